#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# What a container needs of the daemon outside of it: its socket, and nothing else. A client runs as nobody, without any
# capability, in mount and process namespaces of its own that hold a C library, the socket and a checkpoint; then two run
# with overlay mounts of their own over one lower folder, as containers of one image do: one file, one copy.
#
# Everything runs in a process namespace that ends with this script, and so do its mounts and processes.
set -u
cd "$(dirname "$0")/.." || exit 2
. tests/sum.sh
: "${OUT:=$PWD/.out}" "${CC:=cc}" "${SANITIZE:=}"

if [ "${1:-}" != inside ]; then
	if [ "$(id -u)" != 0 ]; then
		skip container 'namespaces and mounts need root'
	elif said=$(unshare --mount --pid --fork --kill-child --mount-proc true 2>&1); then
		exec unshare --mount --pid --fork --kill-child --mount-proc "$0" inside
	else
		skip container "no namespaces here: ${said##*$'\n'}"
	fi
	sum
	exit 77
fi

dir=$(mktemp -d "${TMPDIR:-/var/tmp}/weightd-container.XXXXXX") || exit 2
# Lazily: who is killed with the namespace has files open there.
trap 'umount -Rl "$dir/root" "$dir"/over*/files 2>/dev/null; rm -rf "$dir"' EXIT
weightd=$OUT/weightd
export WEIGHTD_SOCKET=$dir/weightd.sock

# ---- a client: writes a file's bytes to stdout out of weights, then stays until its stdin ends
cat >"$dir/client.c" <<'END'
#include <stdio.h>
#include <unistd.h>
#include <weightd.h>

int main(int argc, char **argv)
{
	struct wd_options options = { .size = sizeof(options), .way = WD_WAY_DAEMON };
	struct wd_model *model;
	struct wd *wd;
	char byte;

	if (argc < 2 || wd_connect(&options, &wd) < 0 || wd_model_open_raw(wd, argv[1], 0, 0, NULL, &model) < 0) {
		fprintf(stderr, "client: %s\n", wd_error());
		return 1;
	}
	const struct wd_tensor *t = wd_model_tensor_at(model, 0);
	for (uint64_t done = 0; done < t->nbytes;) {
		ssize_t n = write(1, (const char *)t->data + done, t->nbytes - done);

		if (n <= 0) {
			perror("client: write");
			return 1;
		}
		done += (uint64_t)n;
	}
	close(1);
	while (read(0, &byte, 1) > 0)
		;
	wd_model_close(model);
	wd_disconnect(wd);
	return 0;
}
END
if ! said=$($CC -std=gnu17 -Wall -Wextra ${SANITIZE:+-fsanitize=$SANITIZE} -Ilib/include "$dir/client.c" -L"$OUT" -lweightd \
	-o "$dir/client" 2>&1); then
	fail "the client compiles: $said"
	sum
	exit 1
fi

# ---- the daemon, outside
"$weightd" serve --socket="$WEIGHTD_SOCKET" >"$dir/log" 2>&1 &
daemon=$!
until "$weightd" stat --json >/dev/null 2>&1; do
	if ! kill -0 $daemon 2>/dev/null; then
		fail "the daemon starts: $(tail -n 1 "$dir/log")"
		sum
		exit 1
	fi
	sleep 0.05
done

number() { "$weightd" stat --json | grep -oE "\"$1\": *[0-9]+" | head -n 1 | grep -oE '[0-9]+$'; }

# ---- a root folder of its own
root=$dir/root
mkdir "$root" && mount -t tmpfs none "$root" && chmod 755 "$root" "$dir" || exit 2
mkdir "$root"/{app,data,proc,run,usr}
for at in usr lib lib64; do
	[ -e /$at ] || continue
	if [ -L /$at ]; then ln -s "$(readlink /$at)" "$root/$at"; else mkdir -p "$root/$at" && mount --rbind -o ro /$at "$root/$at"; fi
done
head -c 20000001 /dev/urandom >"$dir/weights"
chmod 644 "$dir/weights"
touch "$root/data/weights" "$root/run/weightd.sock"
mount --bind -o ro "$dir/weights" "$root/data/weights"
mount --bind "$WEIGHTD_SOCKET" "$root/run/weightd.sock"
cp "$dir/client" "$OUT"/libweightd.so.[0-9] "$root/app/"
chmod -R a+rX "$root/app"

# $1: root folder, $2: file in it. As nobody, without capabilities; other processes, /dev and /sys are not seen.
contained() {
	unshare --mount --pid --fork --kill-child bash -c 'mount -t proc proc "$1/proc" &&
		exec chroot "$1" /usr/bin/setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --bounding-set=-all \
		/usr/bin/env -i WEIGHTD_SOCKET=/run/weightd.sock LD_LIBRARY_PATH=/app /app/client "$2"' - "$1" "$2"
}
contained "$root" /data/weights </dev/null 2>"$dir/said" | cmp - "$dir/weights" >>"$dir/said" 2>&1
check "a client in a container gets every byte: $(tail -n 1 "$dir/said")" same '0 0' "${PIPESTATUS[*]}"
check 'its weights are in the daemon' test "$(number resident_bytes)" -ge 20000001

# ---- two overlays, one lower file
over() { mount -t overlay overlay -o "lowerdir=$dir/lower,upperdir=$1/upper,workdir=$1/work" "$1/files"; }
mkdir "$dir/lower" "$dir"/over{1,2} "$dir"/over{1,2}/{upper,work,files}
head -c 10000000 /dev/urandom >"$dir/lower/weights"
chmod -R a+rX "$dir/lower"
if said=$(over "$dir/over1" 2>&1 && over "$dir/over2" 2>&1); then
	views=$(number views) bytes=$(number read_bytes)
	for i in 1 2; do
		mkfifo "$dir/hold$i"
		LD_LIBRARY_PATH=$OUT "$dir/client" "$dir/over$i/files/weights" <"$dir/hold$i" >"$dir/got$i" 2>"$dir/said" &
		exec {hold[i]}>"$dir/hold$i"
		for ((n = 0; n < 1200; n++)); do
			! cmp -s "$dir/got$i" "$dir/lower/weights" || break
			sleep 0.05
		done
		check "overlay $i: every byte: $(tail -n 1 "$dir/said")" cmp "$dir/got$i" "$dir/lower/weights"
	done
	check 'one lower file through two overlays is one source' same 1 $(($(number views) - views))
	check 'it is read once' test $(($(number read_bytes) - bytes)) -lt 15000000
else
	skip 'one lower file through two overlays is one source' "no overlay mounts here: ${said##*$'\n'}"
fi

sum
