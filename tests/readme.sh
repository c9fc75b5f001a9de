#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# What the README and the pages say is so: its C program compiles and gives the right sums, also twice at once with a
# daemon; help, man page and completion know the same commands and options.
set -u
cd "$(dirname "$0")/.." || exit 2
. tests/sum.sh
: "${OUT:=$PWD/.out}" "${CC:=cc}" "${SANITIZE:=}"

dir=$(mktemp -d "${TMPDIR:-/var/tmp}/weightd-readme.XXXXXX") || exit 2
weightd=$OUT/weightd
trap '[ ! -e "$dir/weightd.sock" ] || "$weightd" shutdown --socket="$dir/weightd.sock"; rm -rf "$dir"' EXIT
page=cli/man/weightd.1

# ---- the program. Its checkpoint holds 3,000 times 0.5 and 2,000 times 1.0 (little-endian floats).
header='{"half":{"dtype":"F32","shape":[30,100],"data_offsets":[0,12000]},'
header+='"one":{"dtype":"F32","shape":[2000],"data_offsets":[12000,20000]}}'
while [ $((${#header} % 8)) != 0 ]; do header+=' '; done
{
	printf "\\x$(printf %02x $((${#header} & 255)))\\x$(printf %02x $((${#header} >> 8)))\\0\\0\\0\\0\\0\\0%s" "$header"
	for ((i = 0; i < 3000; i++)); do printf '\0\0\0\077'; done
	for ((i = 0; i < 2000; i++)); do printf '\0\0\200\077'; done
} >"$dir/a.safetensors"
cp "$dir/a.safetensors" "$dir/b.safetensors"

sed -n '/^```c$/,/^```$/p' README.md | sed '/^```/d' >"$dir/program.c"
check 'the C program compiles without warnings' $CC -std=gnu17 -Wall -Wextra -Werror ${SANITIZE:+-fsanitize=$SANITIZE} \
	-Ilib/include "$dir/program.c" -L"$OUT" -lweightd -o "$dir/program"
want=$(printf '%s\n' 'half F32 sum 1500' 'one F32 sum 2000' 'half F32 sum 1500' 'one F32 sum 2000')
for mode in auto mmap; do
	WEIGHTD_MODE=$mode LD_LIBRARY_PATH=$OUT "$dir/program" "$dir/a.safetensors" "$dir/b.safetensors" >"$dir/said" 2>&1
	check "the C program ends well (WEIGHTD_MODE=$mode): $(tail -n 1 "$dir/said")" test $? = 0
	check "its sums are right (WEIGHTD_MODE=$mode)" diff <(echo "$want") <(grep ' sum ' "$dir/said")
done

# ---- one copy for the node: the commands of the README. It must be the daemon that the programs use.
sed -n '/^```sh$/,/^```$/p' README.md | sed '/^```/d' >"$dir/node.sh"
cp "$dir/a.safetensors" "$dir/model.safetensors"
(cd "$dir" && PATH=$OUT:$PATH LD_LIBRARY_PATH=$OUT WEIGHTD_MODE=daemon timeout 60 bash -e node.sh) >"$dir/said" 2>&1
check "the commands of the README end well: $(tail -n 1 "$dir/said")" test $? = 0
check 'both programs print the right sums' diff <(sort <<<"$want") <(grep ' sum ' "$dir/said" | sort)
check 'weightd ls names the file once' test "$(grep -c '^[^ ]*model\.safetensors ' "$dir/said")" = 1
check 'weightd shutdown ends the daemon' test ! -e "$dir/weightd.sock"

# ---- commands and options
words() { grep -oE -- '(^|[^-[:alnum:]])--[a-z][a-z-]*' | grep -oE -- '--[a-z-]+' | sort -u; }
# The options that the man page has for a command: "weightd inspect".
documented() {
	awk -v command="$1" '
		/^\.S[sh] / { here = ($0 == ".Ss weightd " command) }
		here && /^\.It Fl Fl / { print "--" $4 }' "$page"
}
# What the completion offers after these words.
completed() {
	COMP_WORDS=(weightd "$@") COMP_CWORD=$# COMP_LINE="weightd $*" COMPREPLY=()
	_weightd
	printf '%s\n' "${COMPREPLY[@]}" | sed 's/[= ]*$//'
}
. cli/completion.bash

commands=$("$weightd" help | sed -n '/^Commands:/,/^$/s/^  *\([a-z][a-z-]*\).*/\1/p')
check 'help lists commands' test -n "$commands"
check 'the man page has the same commands' same "$commands" "$(sed -n 's/^\.Ss weightd //p' $page)"
check 'the completion has the same commands' same "$commands
--help
--version" "$(completed '')"
for command in $commands; do
	said=$("$weightd" "$command" --help)
	check "weightd $command --help works" test $? = 0
	options=$(words <<<"$said")
	check "weightd $command: help and man page have the same options" same "$options" "$(documented "$command")"
	check "weightd $command: help and completion have the same options" same "$options" "$(completed "$command" --)"
done
all=$(for command in $commands; do "$weightd" "$command" --help; done | words)
check 'the README names only options that exist' same '' \
	"$(grep -F 'weightd' README.md | grep -v -e pkg-config -e systemctl -e systemd- | words | grep -vxF -- "$all")"
check 'the README names every command' same "$commands" \
	"$(for command in $commands; do grep -q "weightd $command" README.md && echo "$command"; done)"

sum
