# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Completion of weightd(1) for bash. tests/readme.sh compares it with what --help says.

_weightd()
{
	local commands='inspect doctor demo serve ls stat prefetch drop pin unpin shutdown version help'
	local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} options i

	COMPREPLY=()
	if [ "$COMP_CWORD" = 1 ]; then
		mapfile -t COMPREPLY < <(compgen -W "$commands --help --version" -- "$word")
		return
	fi

	# bash takes "--folder=DIR" as three words.
	if [ "$word" = '=' ]; then
		word=
	elif [ "$before" = '=' ]; then
		before=${COMP_WORDS[COMP_CWORD - 2]}
	fi
	case $before in
	--folder | --cache)
		compopt -o filenames 2>/dev/null
		mapfile -t COMPREPLY < <(compgen -d -- "$word")
		return
		;;
	--modes)
		mapfile -t COMPREPLY < <(compgen -W 'eager,mmap,staged eager mmap staged' -- "$word")
		return
		;;
	--variant)
		mapfile -t COMPREPLY < <(compgen -W 'fp16 bf16 fp32' -- "$word")
		return
		;;
	--socket | --config)
		compopt -o filenames 2>/dev/null
		mapfile -t COMPREPLY < <(compgen -f -- "$word")
		return
		;;
	--numa)
		mapfile -t COMPREPLY < <(compgen -W 'default interleave local' -- "$word")
		return
		;;
	--size | --seed | --limit | --bytes | --watch) return ;;
	--socket-mode | --budget | --idle-exit | --preload | --max-* | --pin-percent | --spin-us) return ;;
	esac

	case $command in
	inspect) options='--json --metadata --trailing --variant= --help' ;;
	doctor) options='--folder= --socket= --json --help' ;;
	demo) options='--size= --seed= --cache= --warm --limit= --modes= --json --help' ;;
	serve)
		options='--config= --socket= --socket-mode= --budget= --idle-exit= --preload= --numa= --max-clients='
		options+=' --max-clients-per-user= --max-views= --pin-percent= --spin-us= --takeover --no-keeper --detach --help'
		;;
	ls) options='--clients --watch --socket= --json --help' ;;
	stat) options='--watch --socket= --json --help' ;;
	prefetch) options='--pin --no-wait --variant= --socket= --json --help' ;;
	drop) options='--all --bytes= --force --variant= --socket= --json --help' ;;
	pin | unpin) options='--variant= --socket= --json --help' ;;
	shutdown) options='--socket= --json --help' ;;
	version) options='--json --help' ;;
	help) options='--help' ;;
	*) return ;;
	esac
	if [[ $word == -* ]]; then
		mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
		if [[ ${#COMPREPLY[@]} = 1 && ${COMPREPLY[0]} == *= ]]; then
			compopt -o nospace 2>/dev/null
		fi
		return
	fi
	case $command in
	inspect | demo | prefetch | drop | pin | unpin)
		compopt -o filenames 2>/dev/null
		mapfile -t COMPREPLY < <(compgen -f -- "$word")
		for i in "${!COMPREPLY[@]}"; do
			[[ -d ${COMPREPLY[i]} || ${COMPREPLY[i]} == *.@(safetensors|json) ]] || unset "COMPREPLY[i]"
		done
		COMPREPLY=("${COMPREPLY[@]}")
		;;
	help) mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$word") ;;
	esac
}

complete -F _weightd weightd
