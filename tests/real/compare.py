# SPDX-License-Identifier: Apache-2.0
"""compare.py CHECKPOINT INSPECT_JSON DUMP: does weightd see what the reference package sees?

INSPECT_JSON is what `weightd inspect --json CHECKPOINT` printed, DUMP what tests/real/dump_tensors printed. The
reference gives every tensor's name, dtype, shape and bytes; all four must be equal, and none may be missing on either
side. The offsets that inspect tells are checked by reading the file there.
"""

import hashlib
import json
import sys

from safetensors import deserialize, safe_open


def sha(data):
    return hashlib.sha256(data).hexdigest()


def from_reference(path):
    """name -> (dtype, shape, SHA-256), by both of the package's readers."""
    with open(path, "rb") as file:
        tensors = dict(deserialize(file.read()))
    seen = {name: (t["dtype"], tuple(t["shape"]), sha(bytes(t["data"]))) for name, t in tensors.items()}
    with safe_open(path, framework="numpy") as file:
        opened = {name: file.get_slice(name) for name in file.keys()}
        shapes = {name: tuple(t.get_shape()) for name, t in opened.items()}
    if shapes != {name: t[1] for name, t in seen.items()}:
        raise SystemExit(f"{path}: the reference's two readers disagree")
    return seen


def from_inspect(path, text):
    checkpoint = json.loads(text)["checkpoints"][0]
    seen = {}
    for tensor in checkpoint["tensors"]:
        with open(checkpoint["files"][tensor["file"]]["path"], "rb") as file:
            file.seek(tensor["offset"])
            data = file.read(tensor["bytes"])
        if tensor["name"] in seen:
            raise SystemExit(f"{path}: inspect lists {tensor['name']} twice")
        seen[tensor["name"]] = (tensor["dtype"], tuple(tensor["shape"]), sha(data))
    return seen


def from_dump(text):
    seen = {}
    for line in text.splitlines():
        digest, dtype, shape, name = line.split(" ", 3)
        seen[name] = (dtype, tuple(int(n) for n in shape.split("x") if n), digest)
    return seen




def compare(path, what, ours, reference):
    """How many tensors differ; each is told."""
    wrong = 0
    for name in sorted(set(ours) | set(reference)):
        mine, theirs = ours.get(name), reference.get(name)
        if mine != theirs:
            wrong += 1
            print(f"{path}: {what}: {name}: weightd has {mine}, the reference {theirs}")
    return wrong


def main():
    path, inspect, dump = sys.argv[1:]
    reference = from_reference(path)
    with open(inspect, encoding="utf-8") as file:
        wrong = compare(path, "inspect", from_inspect(path, file.read()), reference)
    with open(dump, encoding="utf-8") as file:
        wrong += compare(path, "paged in", from_dump(file.read()), reference)
    if not reference:
        raise SystemExit(f"{path}: the reference sees no tensor")
    dtypes = sorted({tensor[0] for tensor in reference.values()})
    print(f"{path.rsplit('/', 1)[-1]}: {len(reference)} tensors ({', '.join(dtypes)}), {wrong} differ")
    return wrong > 0


sys.exit(main())
