#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Rules that a compiler does not check. `tests/lint.sh --fix` formats the C files.
# Each rule counts as one test.
set -u
shopt -s lastpipe # the last command of a pipe counts in this shell
cd "$(dirname "$0")/.." || exit 2

. tests/sum.sh

mapfile -t files < <(find . \( -name .git -o -name '.out*' \) -prune -o -type f -printf '%P\n' | sort)
c_files() { printf '%s\n' "${files[@]}" | grep -E '\.[ch]$'; }
scripts() { grep -lE '^#!/bin/(ba)?sh' -- "${files[@]}"; }

# What breaks a rule comes in by standard input, a line each. $1: the rule.
none() {
	local found
	found=$(cat)
	if [ -z "$found" ]; then pass; else fail "$1"; sed 's/^/     /' <<<"$found"; fi
}

# A C file without comments and texts (prose may name what code may not).
code() { gcc -fpreprocessed -dD -E "$1" 2>/dev/null | grep -v '^# ' | sed -E 's/"(\\.|[^"\\])*"/""/g'; }
# Where code, not prose, has a pattern. $1: pattern, then files.
uses() {
	local pattern=$1 f
	shift
	for f; do code "$f" | grep -E -- "$pattern" | sed "s|^|$f: |"; done
}

# ---- rooms: who may include whom. First rule that fits the file decides.
rooms() {
	local f
	while read -r f; do
		case $f in
		lib/include/*) allowed='^$' ;;
		lib/base/*) allowed='^lib/base/' ;;
		ufd/*) allowed='^(ufd|lib/base)/' ;;
		lib/*) allowed='^(lib|ufd)/' ;;
		cli/*) allowed='^(cli|lib|ufd|bpf)/' ;;
		*) allowed='^(tests|cli|lib|ufd|bpf)/' ;;
		esac
		sed -nE 's/^[ \t]*#[ \t]*include[ \t]*"([^"]*)".*/\1/p' "$f" | grep -vE "$allowed" | sed "s|^|$f may not include |"
	done < <(c_files)
}
rooms | none 'rooms: lib/base <- ufd <- lib <- cli, includes from the root'

c_library='<(stddef|stdint)\.h>'
grep -nE '^[ \t]*#[ \t]*include' lib/include/*.h /dev/null | grep -vE "$c_library" |
	none 'public headers include only the C library'

mapfile -t others < <(c_files | grep -vE '^(ufd/uffd\.[ch]|tests/)')
uses '\bUFFDIO_' "${others[@]}" | none 'only ufd/uffd.c knows the ioctls of userfaultfd'
mapfile -t others < <(c_files | grep -vE '^(ufd/ring\.[ch]|tests/)')
uses 'liburing\.h' "${others[@]}" | none 'only ufd/ring.c includes liburing.h'

# ---- text
for f in "${files[@]}"; do
	case $f in *.[ch] | *.py | tests/bench/run | *.sh | *.bash | Makefile | .ci/run | *.[1-8])
		head -n 2 "$f" | grep -q 'SPDX-License-Identifier: Apache-2\.0' || echo "$f" ;;
	esac
done | none 'SPDX line on top'
grep -nIE '\b(T[O]DO|F[I]XME|X[X]X|H[A]CK)\b' -- "${files[@]}" | none 'nothing is left for later'
grep -nIE '(^|[^[:alnum:]_.])/(w[o]rk|h[o]me|r[o]ot)/' -- "${files[@]}" | none "no path of somebody's machine"
grep -nIE '[ 	]+$' -- "${files[@]}" | grep -v '^LICENSE:' | none 'no blanks at the end of a line'
for f in "${files[@]}"; do [ -z "$(tail -c 1 "$f")" ] || echo "$f"; done | none 'files end with a newline'
for f in $(scripts); do bash -n "$f" 2>&1; [ -x "$f" ] || echo "$f is not executable"; done |
	none 'scripts parse and can be run'

# ---- pages
for name in $(sed -nE 's/^WD_API.*[ *](wd_[a-z_]+)[^a-z_ ].*/\1/p' lib/include/weightd.h); do
	grep -q "^\.Fn $name " lib/man/weightd.3 || echo "$name"
done | none 'weightd(3) has every function'
mapfile -t pages < <(printf '%s\n' "${files[@]}" | grep -E '/man/.*\.[1-8]$')
if [ ${#pages[@]} = 0 ]; then
	echo 'there are none' | none 'man pages'
elif command -v mandoc >/dev/null; then
	mandoc -T lint -W warning "${pages[@]}" 2>&1 | none 'man pages: mandoc -T lint'
else
	skip 'man pages' 'mandoc is not installed'
fi


# ---- format
# Each major version of clang-format has its own taste.
made_for=$(sed -n 's/^# Made for clang-format \([0-9]*\).*/\1/p' .clang-format)
for clang_format in clang-format clang-format-"$made_for" ''; do
	[ -n "$clang_format" ] && command -v "$clang_format" >/dev/null || continue
	has=$("$clang_format" --version | sed -nE 's/.*version ([0-9]+)\..*/\1/p')
	[ "$has" != "$made_for" ] || break
done
if [ -z "${has:-}" ]; then
	skip 'format' 'clang-format is not installed'
elif [ -z "$clang_format" ]; then
	skip 'format' "it is made for clang-format $made_for; here is $has"
else
	# Macros are laid out by hand: only what lies between the preprocessor's lines is formatted.
	while read -r f; do
		mapfile -t lines < <(awk '
			function range() { if (first) print "--lines=" first ":" NR - 1; first = 0 }
			/^[ \t]*#/ || more { range(); more = /\\$/; next }
			!first { first = NR }
			END { NR++; range() }' "$f")
		[ "${1:-}" != --fix ] || "$clang_format" -i "${lines[@]}" "$f"
		"$clang_format" "${lines[@]}" "$f" | diff -q "$f" - >/dev/null || echo "$f: tests/lint.sh --fix mends it"
	done < <(c_files) | none 'format: .clang-format'
fi

sum
