# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Counting tests, for the scripts that source it. Each skip is a line "SKIP <name>: <reason>"; the last line of a
# script is the sum: "N passed, N failed, N skipped".

passed=0 failed=0 skipped=0 bad=()

pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); bad+=("$1"); echo "FAIL $1"; }
skip() { skipped=$((skipped + 1)); echo "SKIP $1: $2"; }

# Runs a command, which must succeed; shows what it said only if it does not. $1: what must hold; then the command.
check() {
	local said
	if said=$("${@:2}" 2>&1); then
		pass
	else
		fail "$1"; [ -z "$said" ] || sed 's/^/     /' <<<"$said"
	fi
}

# Two lists have the same lines.
same() { diff <(sort -u <<<"$1") <(sort -u <<<"$2"); }

# Adds what a program's log says. $1: its name, $2: its exit status, $3: the log.
# In this order: the last line of our form in it; the lines of Check ("100%: Checks: 5, Failures: 0, Errors: 0") and of
# skips; the exit status (0 passed, 77 skipped). Nothing run and nothing skipped is a failure, and so is a status
# that says one where the log does not.
count() {
	local p=0 f=0 s n fails errors sum checks
	s=$(grep -c '^SKIP [^:]*: ' "$3")
	sum=$(grep -xE '[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' "$3" | tail -n 1)
	checks=$(sed -nE 's/^[0-9]+%: Checks: ([0-9]+), Failures: ([0-9]+), Errors: ([0-9]+)$/\1 \2 \3/p' "$3")
	if [ -n "$sum" ]; then
		read -r p _ f _ s _ <<<"$sum"
	elif [ -n "$checks" ]; then
		while read -r n fails errors; do
			p=$((p + n - fails - errors)) f=$((f + fails + errors))
		done <<<"$checks"
	elif [ "$2" = 0 ] && [ "$s" = 0 ] && [ "${4:-}" != counts ]; then
		p=1
	fi
	if [ "$2" != 0 ] && [ "$2" != 77 ] && [ $f = 0 ]; then
		f=1
	elif [ $((p + f + s)) = 0 ]; then
		echo "error: $1 ran no test and gave no reason"
		f=1
	fi
	passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
	if [ $f = 0 ]; then echo "ok   $1: $p passed, $s skipped"; else bad+=("$1"); echo "FAIL $1: $p passed, $f failed, $s skipped"; fi
}

# The last line; its status is that of the whole.
sum() {
	[ $failed = 0 ] || printf 'failed: %s\n' "${bad[@]}"
	echo "$passed passed, $failed failed, $skipped skipped"
	[ $failed = 0 ]
}
