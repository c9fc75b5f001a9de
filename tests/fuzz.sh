#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds every tests/fuzz_*.c with libFuzzer, in a folder of its own (coverage of the whole library steers it), and runs
# it for its share of FUZZ_SECONDS. Files in tests/fuzz_<name>.seeds/ are where it begins. What made it fail stays in
# $OUT/found/.
set -u
cd "$(dirname "$0")/.." || exit 2
. tests/sum.sh
: "${OUT:=$PWD/.out/fuzz}" "${FUZZ_SECONDS:=60}"

dir=$(mktemp -d "${TMPDIR:-/var/tmp}/weightd-fuzz.XXXXXX") || exit 2
trap 'rm -rf "$dir"' EXIT
export TMPDIR=$dir

mapfile -t targets < <(ls tests/fuzz_*.c 2>/dev/null)
echo 'int LLVMFuzzerTestOneInput(const unsigned char *p, unsigned long n) { return p && n ? 0 : -1; }' >"$dir/try.c"
if [ ${#targets[@]} = 0 ]; then
	fail 'there is no fuzz target'
elif ! clang -fsanitize=fuzzer,address "$dir/try.c" -o "$dir/try" 2>"$dir/log"; then
	skip fuzz "clang with libFuzzer is not here ($(tail -n 1 "$dir/log"))"
else
	make --no-print-directory fuzzers OUT="$OUT" CC=clang SANITIZE=fuzzer-no-link,address,undefined CFLAGS='-O1 -g' ||
		{ fail 'the fuzz targets do not build'; targets=(); }
	mkdir -p "$OUT/found"
	for target in "${targets[@]}"; do
		name=$(basename "$target" .c)
		mkdir -p "$dir/$name"
		seeds=()
		[ ! -d "tests/$name.seeds" ] || seeds=("tests/$name.seeds")
		"$OUT/tests/$name" -max_total_time=$((FUZZ_SECONDS / ${#targets[@]} + 1)) -timeout=20 -rss_limit_mb=2048 \
			-artifact_prefix="$OUT/found/$name-" -print_final_stats=1 "$dir/$name" "${seeds[@]}" \
			>"$dir/log" 2>&1 </dev/null
		status=$?
		runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$dir/log")
		if [ $status = 0 ] && [ "${runs:-0}" -gt 0 ]; then
			pass
			echo "ok   $name: $runs inputs, $(grep -oE 'cov: [0-9]+' "$dir/log" | tail -n 1)"
		else
			fail "$name"
			tail -n 60 "$dir/log"
		fi
	done
fi
sum
