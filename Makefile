# SPDX-License-Identifier: Apache-2.0
#
# make            the tool, the libraries and their links, in $(OUT)
# make demo       the main job; DEMO="--size 64M" passes options through
# make check      all tests; TESTS="pager readme" only these
# make deps       installs what demo and check need from Debian (root), or prints the apt-get line
# make soak       the long tests, SOAK_SECONDS of each; SOAK="daemons forks" only these
# make bench, make real, make fuzz, make lint, make install, make uninstall, make clean
#
# Variables: CC, CXX, CFLAGS, LDFLAGS, OUT, V=1 (show commands), WERROR=1, SANITIZE=address,undefined,
# PREFIX, BINDIR, LIBDIR, UNITDIR, USERUNITDIR, SYSUSERSDIR, TMPFILESDIR, UDEVDIR, DESTDIR, FUZZ_SECONDS,
# SOAK_SECONDS. A new .c file needs no line here: folders decide what it belongs to.

# Debian packages, by what needs them: the only list.
PKGS_demo  = build-essential pkgconf libjansson-dev liburing-dev libssl-dev
PKGS_check = $(PKGS_demo) check
PKGS_real  = $(PKGS_demo) python3-venv
PKGS_bench = $(PKGS_check) fio
PKGS_fuzz  = $(PKGS_check) clang libclang-rt-dev
PKGS_lint  = build-essential clang-format mandoc
PKGS_ci    = $(PKGS_real) $(PKGS_bench) $(PKGS_fuzz) $(PKGS_lint)

OUT     = .out
PREFIX  = /usr/local
LIBDIR  = $(PREFIX)/lib
CFLAGS  = -O2 -g
SANITIZE =
FUZZ_SECONDS = 60
SOAK_SECONDS = 600

BINDIR = $(PREFIX)/bin
INCDIR = $(PREFIX)/include
MANDIR = $(PREFIX)/share/man
COMPDIR = $(PREFIX)/share/bash-completion/completions
# Where the daemon looks.
CONFDIR = /etc/weightd
# systemd looks below /usr/local/lib as well as below /usr/lib.
UNITDIR     = $(PREFIX)/lib/systemd/system
USERUNITDIR = $(PREFIX)/lib/systemd/user
SYSUSERSDIR = $(PREFIX)/lib/sysusers.d
TMPFILESDIR = $(PREFIX)/lib/tmpfiles.d
UDEVDIR     = $(PREFIX)/lib/udev/rules.d
PKG_CONFIG = pkg-config
LD      = ld
OBJCOPY = objcopy

version_part = $(shell sed -n 's/^.define WD_VERSION_$(1) //p' lib/include/weightd.h)
MAJOR   := $(call version_part,MAJOR)
VERSION := $(MAJOR).$(call version_part,MINOR).$(call version_part,PATCH)
SONAME  := libweightd.so.$(MAJOR)

# ---- what belongs to what
LIB_SRC    := $(wildcard lib/base/*.c ufd/*.c lib/*.c lib/format/*.c)
CLI_SRC    := $(wildcard cli/*.c)
TEST_SRC   := $(wildcard tests/test_*.c)
FUZZ_SRC   := $(wildcard tests/fuzz_*.c)
HELPER_SRC := $(filter-out $(TEST_SRC) $(FUZZ_SRC),$(wildcard tests/*.c))
BENCH_SRC  := $(wildcard tests/bench/*.c)
obj = $(patsubst %.c,$(OUT)/obj/%.o,$(1))

LIB_OBJ    := $(call obj,$(LIB_SRC))
SHARED     := $(OUT)/libweightd.so.$(VERSION)
PRODUCTS   := $(SHARED) $(OUT)/libweightd.a $(if $(CLI_SRC),$(OUT)/weightd)
TEST_BIN   := $(patsubst tests/%.c,$(OUT)/tests/%,$(TEST_SRC))
FUZZ_BIN   := $(patsubst tests/%.c,$(OUT)/tests/%,$(FUZZ_SRC))
BENCH_BIN  := $(patsubst tests/%.c,$(OUT)/tests/%,$(BENCH_SRC))

# ---- flags: what the user gives comes last
WARNINGS = -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wconversion -Wno-sign-conversion
sanitize = $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer)
# _GNU_SOURCE is defined as nothing, so that a file may define it for itself as well.
compile = $(CC) -std=gnu17 -D_GNU_SOURCE= -I. -Ilib/include $(CPPFLAGS) $(WARNINGS) $(if $(WERROR),-Werror) \
	-pthread -fPIC -fvisibility=hidden $(sanitize) $(CFLAGS)
link    = $(CC) -pthread $(sanitize) $(CFLAGS) $(LDFLAGS)
LIB_LIBS = -luring -ljansson
CLI_LIBS = $(LIB_LIBS) -lcrypto -lm
# Asked for when a recipe runs: the package may not be there yet when this file is read.
TEST_LIBS = $(shell $(PKG_CONFIG) --libs check) $(CLI_LIBS)

Q   = $(if $(V),,@)
say = $(if $(V),,@printf '  %-6s %s\n' $(1) $(2))

all: $(PRODUCTS)
	@:
.DELETE_ON_ERROR:
.SECONDARY:
.PHONY: all tests benches fuzzers deps demo check soak bench real fuzz lint install uninstall clean FORCE

# Objects are made again when the commands that make them change.
FLAGS = $(compile) $(link)
$(OUT)/flags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(subst ','\'',$(FLAGS))' | cmp -s - $@ || printf '%s\n' '$(subst ','\'',$(FLAGS))' >$@

$(OUT)/obj/%.o: %.c $(OUT)/flags
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(compile) $(compile_extra) -MMD -MP -c -o $@ $<

# (liburing 2.3 cannot be asked at run time.)
$(OUT)/obj/cli/cmd_version.o: compile_extra = -DWD_LIBURING_VERSION='"$(shell $(PKG_CONFIG) --modversion liburing)"'

# Where a static program finds the daemon that it starts; a shared library looks beside itself first. (Installed with
# another PREFIX than built, it is not there, and PATH is asked.)
$(OUT)/obj/ufd/client_start.o: compile_extra = -DWD_BINDIR='"$(BINDIR)"'

# A static program shares one name space with us: internal names are made local to the one object of the archive.
$(OUT)/libweightd.a: $(LIB_OBJ)
	$(call say,AR,$@)
	$(Q)$(LD) -r -o $(OUT)/obj/libweightd.o $^
	$(Q)$(OBJCOPY) --localize-hidden $(OUT)/obj/libweightd.o
	$(Q)rm -f $@ && $(AR) rcs $@ $(OUT)/obj/libweightd.o

# nodelete: the fork and signal handlers stay as long as the process. (A sanitizer's symbols come from the program, so
# -z defs would refuse them.)
$(SHARED): $(LIB_OBJ) lib/weightd.map
	$(call say,LINK,$@)
	$(Q)$(link) -shared -Wl,-soname,$(SONAME),--version-script,lib/weightd.map -Wl,-z,nodelete $(if $(SANITIZE),,-Wl,-z,defs) \
		-o $@ $(LIB_OBJ) $(LIB_LIBS)
	$(Q)ln -sf $(@F) $(OUT)/$(SONAME) && ln -sf $(SONAME) $(OUT)/libweightd.so

# The tool and the tests use internal functions too, so they take the objects.
$(OUT)/weightd: $(call obj,$(CLI_SRC)) $(LIB_OBJ)
	$(call say,LINK,$@)
	$(Q)$(link) -o $@ $^ $(CLI_LIBS)

$(OUT)/obj/helpers.a: $(call obj,$(HELPER_SRC))
	$(Q)rm -f $@ && $(AR) rcs $@ $^

# Tests of the daemon run its command as a function, with hooks.
$(OUT)/obj/cli.a: $(filter-out %/main.o,$(call obj,$(CLI_SRC)))
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(OUT)/tests/%: $(OUT)/obj/tests/%.o $(OUT)/obj/helpers.a $(OUT)/obj/cli.a $(LIB_OBJ)
	$(call say,LINK,$@)
	@mkdir -p $(@D)
	$(Q)$(link) $(link_extra) -o $@ $^ $(TEST_LIBS)

tests: $(TEST_BIN)
	@:
benches: $(BENCH_BIN)
	@:
fuzzers: $(FUZZ_BIN)
fuzzers: link_extra = -fsanitize=fuzzer

# ---- packages. One at a time, so that `make -j demo check` does not start apt-get twice.
deps: deps-check
deps-%:
	@exec 9<Makefile && flock 9; \
	if ! command -v dpkg-query >/dev/null; then \
		echo 'note: this is no Debian; needed are the likes of: $(sort $(PKGS_$*))'; exit 0; fi; \
	missing=$$(for p in $(sort $(PKGS_$*)); do \
		dpkg-query -Wf '$${db:Status-Status}\n' $$p 2>/dev/null | grep -qx installed || printf ' %s' $$p; done); \
	[ -n "$$missing" ] || exit 0; \
	echo "Debian packages that are missing:$$missing"; \
	install="apt-get install -y --no-install-recommends$$missing"; \
	if [ "$$(id -u)" != 0 ]; then \
		echo "error: only root can install them. Run as root: apt-get update && $$install"; exit 1; fi; \
	export DEBIAN_FRONTEND=noninteractive; apt-get update && $$install

# ---- jobs. They build by a make of their own: compilers may have come with the packages only now.
build = +$(Q)$(MAKE) --no-print-directory
tools = OUT='$(abspath $(OUT))' CC='$(CC)' CXX='$(CXX)' SANITIZE='$(SANITIZE)'

demo: deps-demo
	$(build) all
	$(OUT)/weightd demo $(DEMO)

check: deps-check
	$(build) all tests
	$(Q)$(tools) tests/run.sh $(TESTS)

soak: deps-check
	$(build) all tests
	$(Q)$(tools) SOAK_SECONDS='$(SOAK_SECONDS)' tests/soak $(SOAK)

bench: deps-bench
	$(build) all benches
	$(Q)$(tools) tests/bench/run $(BENCH)

real: deps-real
	$(build) all
	$(Q)$(tools) tests/real.sh || [ $$? = 77 ]

fuzz: deps-fuzz
	$(Q)OUT='$(abspath $(OUT))/fuzz' FUZZ_SECONDS='$(FUZZ_SECONDS)' tests/fuzz.sh

lint: deps-lint
	$(Q)tests/lint.sh

# ---- install
man = $(wildcard lib/man/*.$(1) cli/man/*.$(1))
commands  = inspect doctor demo serve ls stat prefetch drop pin unpin shutdown
functions = $(shell sed -nE 's/^WD_API.*[ *](wd_[a-z_]+)[^a-z_ ].*/\1/p' lib/include/weightd.h)
sections  = 1 3 5 7
units     = weightd.service weightd.socket
# Where a file of cli/systemd goes.
place = sed 's|@BINDIR@|$(BINDIR)|g; s|@CONFDIR@|$(CONFDIR)|g' cli/systemd/$(1) >$(DESTDIR)$(2) && chmod 644 $(DESTDIR)$(2)

install: all
	install -d $(addprefix $(DESTDIR),$(BINDIR) $(INCDIR) $(LIBDIR)/pkgconfig $(COMPDIR) $(sections:%=$(MANDIR)/man%) \
		$(CONFDIR) $(UNITDIR) $(USERUNITDIR) $(SYSUSERSDIR) $(TMPFILESDIR) $(UDEVDIR))
	install -m 755 $(OUT)/weightd $(DESTDIR)$(BINDIR)/weightd
	install -m 644 lib/include/weightd.h $(DESTDIR)$(INCDIR)/weightd.h
	install -m 644 $(OUT)/libweightd.a $(DESTDIR)$(LIBDIR)/libweightd.a
	install -m 755 $(SHARED) $(DESTDIR)$(LIBDIR)/$(notdir $(SHARED))
	ln -sf $(notdir $(SHARED)) $(DESTDIR)$(LIBDIR)/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/libweightd.so
	sed 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(LIBDIR)|; s|@VERSION@|$(VERSION)|' lib/weightd.pc.in \
		>$(DESTDIR)$(LIBDIR)/pkgconfig/weightd.pc
	chmod 644 $(DESTDIR)$(LIBDIR)/pkgconfig/weightd.pc
	install -m 644 cli/completion.bash $(DESTDIR)$(COMPDIR)/weightd
	$(foreach u,$(units),$(call place,system/$(u),$(UNITDIR)/$(u)) && $(call place,user/$(u),$(USERUNITDIR)/$(u)) &&) :
	$(call place,weightd.sysusers,$(SYSUSERSDIR)/weightd.conf)
	$(call place,weightd.tmpfiles,$(TMPFILESDIR)/weightd.conf)
	$(call place,60-weightd.rules,$(UDEVDIR)/60-weightd.rules)
	[ -e $(DESTDIR)$(CONFDIR)/weightd.conf ] || { $(call place,weightd.conf,$(CONFDIR)/weightd.conf); }
	$(foreach s,$(sections),install -m 644 $(call man,$(s)) $(DESTDIR)$(MANDIR)/man$(s) &&) :
	cd $(DESTDIR)$(MANDIR)/man1 && for n in $(commands); do ln -sf weightd.1 weightd-$$n.1 || exit 1; done
	cd $(DESTDIR)$(MANDIR)/man3 && for n in $(functions); do ln -sf weightd.3 $$n.3 || exit 1; done
	$(if $(DESTDIR),,[ "$$(id -u)" != 0 ] || ldconfig)

# A weightd.conf that somebody has changed stays.
uninstall:
	rm -f $(addprefix $(DESTDIR),$(BINDIR)/weightd $(INCDIR)/weightd.h $(LIBDIR)/pkgconfig/weightd.pc \
		$(COMPDIR)/weightd $(addprefix $(LIBDIR)/,libweightd.a libweightd.so $(SONAME) $(notdir $(SHARED))) \
		$(addprefix $(UNITDIR)/,$(units)) $(addprefix $(USERUNITDIR)/,$(units)) \
		$(SYSUSERSDIR)/weightd.conf $(TMPFILESDIR)/weightd.conf $(UDEVDIR)/60-weightd.rules \
		$(foreach s,$(sections),$(addprefix $(MANDIR)/man$(s)/,$(notdir $(call man,$(s))))) \
		$(commands:%=$(MANDIR)/man1/weightd-%.1) $(functions:%=$(MANDIR)/man3/%.3))
	! cmp -s cli/systemd/weightd.conf $(DESTDIR)$(CONFDIR)/weightd.conf || rm -f $(DESTDIR)$(CONFDIR)/weightd.conf
	rmdir $(DESTDIR)$(CONFDIR) 2>/dev/null || :

clean:
	rm -rf $(OUT)

-include $(shell find $(OUT)/obj -name '*.d' 2>/dev/null)
