#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# What `make install` gives: header, libraries, pkg-config file, tool, pages, what systemd and udev read; and that
# `make uninstall` takes all of it away again. Installs below a temporary DESTDIR only.
set -u
cd "$(dirname "$0")/.." || exit 2
. tests/sum.sh
: "${OUT:=$PWD/.out}" "${CC:=cc}" "${CXX:=c++}" "${SANITIZE:=}"

dir=$(mktemp -d "${TMPDIR:-/var/tmp}/weightd-install.XXXXXX") || exit 2
trap 'rm -rf "$dir"' EXIT
dest=$dir/dest prefix=/opt/weightd
mk() { (umask 077; make --no-print-directory "$@" OUT="$OUT" DESTDIR="$dest" PREFIX=$prefix); }
check 'make install' mk install
[ $failed = 0 ] || { sum; exit 1; }

lib=$dest$prefix/lib
header=lib/include/weightd.h
version=$(sed -n 's/^#define WD_VERSION "\(.*\)"/\1/p' $header)
soname=libweightd.so.${version%%.*}
api=$(sed -nE 's/^WD_API.*[ *](wd_[a-z_]+)[^a-z_ ].*/\1/p' $header)
export PKG_CONFIG_PATH=$lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$dest

# Sanitizers bring global names of their own.
globals() { nm "$@" | awk 'NF == 3 && $2 != "A" { sub("@.*", ""); print $3 }' | grep -vE '^_*(odr_)?(a|ub)san|^(_end|_edata|__bss_start)$'; }

check 'the version is the same everywhere' same "$version
$version" "$(pkg-config --modversion weightd)
$("$dest$prefix/bin/weightd" version | grep -oE '[0-9]+\.[0-9]+\.[0-9]+' | head -n 1)"
check 'the shared library exports the API and nothing else' same "$api" "$(globals -D --defined-only "$lib/libweightd.so")"
check 'the static library has no other global names' same "$api" "$(globals -g --defined-only "$lib/libweightd.a")"
check 'soname' grep -q "SONAME.*\[$soname\]" <(readelf -d "$lib/libweightd.so")
check 'links of the shared library' same "libweightd.so.$version" "$(basename "$(readlink -f "$lib/$soname")")"
check 'no link leads nowhere' same '' "$(find "$dest" -xtype l)"
check 'everybody may read what is installed' same '' "$(find "$dest$prefix" ! -type l ! -perm -a=r)"
check 'nothing names DESTDIR' same '' "$(grep -rlF "$dir" "$dest")"
for page in weightd.1 weightd.3 weightd-stages.7 weightd-plan.5 weightd.conf.5 wd_model_open.3 weightd-doctor.1 weightd-serve.1; do
	check "page $page" test -s "$dest$prefix/share/man/man${page##*.}/$page"
done
check 'nothing goes beside DESTDIR' same '' "$(mk -n install | grep -E "(^|[ >'])/(etc|opt)/")"
want="
bin/weightd
include/weightd.h
lib/libweightd.a
lib/libweightd.so
lib/$soname
lib/libweightd.so.$version
lib/pkgconfig/weightd.pc
lib/systemd/system/weightd.service
lib/systemd/system/weightd.socket
lib/systemd/user/weightd.service
lib/systemd/user/weightd.socket
lib/sysusers.d/weightd.conf
lib/tmpfiles.d/weightd.conf
lib/udev/rules.d/60-weightd.rules
share/bash-completion/completions/weightd"
check 'what is installed, pages left out' same "${want//$'\n'/$'\n'.$prefix/}
./etc/weightd/weightd.conf" "
$(cd "$dest" && find . ! -type d ! -path '*/man/*')"

# ---- systemd
units=$dest$prefix/lib/systemd
check 'no placeholder is left' same '' "$(grep -rnE '@[A-Z]+@' "$units" "$dest$prefix/lib/sysusers.d" "$dest$prefix/lib/tmpfiles.d" "$dest/etc")"
for kind in system user; do
	check "the $kind service starts what is installed" grep -q "^ExecStart=$prefix/bin/weightd serve" "$units/$kind/weightd.service"
	# The keeper must outlive the main process.
	check "the $kind service spares the keeper" grep -qx KillMode=process "$units/$kind/weightd.service"
	if ! command -v systemd-analyze >/dev/null; then
		skip "the $kind units, by systemd-analyze verify" 'systemd-analyze is not installed'
		continue
	fi
	mkdir -p "$dir/verify/$kind"
	for unit in weightd.service weightd.socket; do
		# It wants the program to be there.
		sed "s|=$prefix|=$dest$prefix|" "$units/$kind/$unit" >"$dir/verify/$kind/$unit"
	done
	# A key that it does not know is a warning, and no failure. What it says about other units is not our business.
	said=$(cd "$dir/verify/$kind" && XDG_RUNTIME_DIR=$dir systemd-analyze verify --man=no "--$kind" ./weightd.service ./weightd.socket 2>&1)
	check "the $kind units, by systemd-analyze verify: $said" test "$? $(grep -c weightd <<<"$said")" = '0 0'
done

# ---- configuration: what somebody wrote stays
conf=$dest/etc/weightd/weightd.conf
echo '# mine' >>"$conf"
check 'make install again' mk install
check 'it spares a weightd.conf that is there' same '# mine' "$(tail -n 1 "$conf")"
check 'make uninstall with a changed weightd.conf' mk uninstall
check 'a changed weightd.conf stays, and nothing else' same "$conf" "$(find "$dest" ! -type d)"
rm -f "$conf"
check 'make install after that' mk install

cat >"$dir/use.c" <<'END'
#include <weightd.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
	struct wd_options options;
	struct wd *wd = NULL;

	if (strcmp(wd_version(), WD_VERSION) != 0)
		return 1;
	memset(&options, 0, sizeof(options));
	options.size = sizeof(options);
	options.way = WD_WAY_MMAP;
	if (wd_connect(&options, &wd) < 0) {
		fprintf(stderr, "%s\n", wd_error());
		return 2;
	}
	wd_disconnect(wd);
	return 0;
}
END
cp "$dir/use.c" "$dir/use.cpp"
sanitize=${SANITIZE:+-fsanitize=$SANITIZE}
warnings='-Wall -Wextra -Wconversion -pedantic-errors -Werror'
cflags=$(pkg-config --cflags weightd)
libs=$(pkg-config --libs weightd)
static=$(pkg-config --static --libs weightd)
with_shared() { LD_LIBRARY_PATH=$lib "$@"; }

check 'pkg-config knows where things are' grep -q -- "-L$lib .*-lweightd" <<<"$libs "
check 'the header is strict C17' $CC -std=c17 $warnings -Wshadow -Wstrict-prototypes $sanitize $cflags "$dir/use.c" -o "$dir/c" $libs
check 'a C program runs with the shared library' with_shared "$dir/c"
check 'it asks for the soname' grep -q "NEEDED.*\[$soname\]" <(readelf -d "$dir/c")
check 'the header is strict C++17' $CXX -std=c++17 $warnings $sanitize $cflags "$dir/use.cpp" -o "$dir/cpp" $libs
check 'a C++ program runs with the shared library' with_shared "$dir/cpp"
check 'a C program links the static library' \
	$CC -std=c17 $sanitize $cflags "$dir/use.c" -o "$dir/static" ${static/-lweightd/-l:libweightd.a}
check 'it runs without the shared one' "$dir/static"
check 'it does not ask for the shared one' same '' "$(readelf -d "$dir/static" | grep -F libweightd)"

check 'make uninstall' mk uninstall
check 'nothing is left' same '' "$(find "$dest" ! -type d)"

sum
