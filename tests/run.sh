#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests: every program made from tests/test_*.c, every script tests/test_*.sh, the install and README
# tests; or only those that are named as arguments ("pager readme"). Called by `make check`, which sets OUT, the
# tools and SANITIZE. Of a test that passed only the skips are shown, of one that failed all that it said.
set -u
cd "$(dirname "$0")/.." || exit 2
. tests/sum.sh
: "${OUT:=$PWD/.out}"
export OUT
limit=${TEST_SECONDS:-900} # for one program; each test in it has its own limit

# The handlers of the sanitizers would answer the faults that the tests make on purpose.
export ASAN_OPTIONS=detect_leaks=1:handle_segv=0:handle_sigbus=0:allocator_may_return_null=1:${ASAN_OPTIONS:-}
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}
[ -z "${SANITIZE:-}" ] || export CK_TIMEOUT_MULTIPLIER=${CK_TIMEOUT_MULTIPLIER:-4}

TMPDIR=$(mktemp -d "${TMPDIR:-/var/tmp}/weightd-check.XXXXXX") || exit 2
chmod 711 "$TMPDIR" # tests that give up root must get through
export TMPDIR
log=$TMPDIR.log
running=
trap '[ -z "$running" ] || kill "$running" 2>/dev/null; rm -rf "$TMPDIR" "$log"' EXIT
trap 'exit 130' INT TERM HUP

for test in tests/test_*.c tests/test_*.sh tests/install.sh tests/readme.sh; do
	[ -e "$test" ] || continue
	name=${test##*/} name=${name#test_} program=$test how=
	[[ $test != *.c ]] || { program=$OUT/tests/test_${name%.c}; how=counts; }
	name=${name%.*}
	[ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
	begin=$SECONDS
	timeout -k 10 "$limit" "$program" </dev/null >"$log" 2>&1 &
	running=$!
	wait $running
	status=$? running=
	[ $status != 124 ] || echo "error: $program ran longer than $limit s" >>"$log"
	if [ $status = 0 ] || [ $status = 77 ]; then grep '^SKIP ' "$log"; else cat "$log"; fi
	count "$name" $status "$log" $how
	[ $((SECONDS - begin)) -lt 60 ] || echo "note: $name took $((SECONDS - begin)) s"
	left=$(ls -A "$TMPDIR")
	if [ -n "$left" ]; then
		fail "$name left files behind: ${left//$'\n'/ }"
		find "$TMPDIR" -mindepth 1 -delete
	fi
done

[ $((passed + failed + skipped)) -gt 0 ] || fail "there is no test of that name: $*"
sum
