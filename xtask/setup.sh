#!/bin/sh
# Installs the requirements of the tests: Debian packages, components of the Rust toolchain and
# programs from crates.io.
#
#   xtask/setup.sh                     report and install missing parts
#   xtask/setup.sh --packages          the packages only, without a check for Rust
#   xtask/setup.sh --package           the tools of packages, from Debian and from crates.io
#   xtask/setup.sh --rust              check the Rust toolchain and the linker only
#   xtask/setup.sh --apt PACKAGE...    these packages of Debian, without their services
#   xtask/setup.sh --backports ETC_APT CODENAME
#                                      print the sources file that would be written
#
# It changes nothing if nothing is missing.

set -eu

# QEMU for the guests of the tests. qemu-block-extra has the driver for Ceph, which measurements
# compare with.
QEMU_PACKAGES="qemu-system-x86 qemu-system-common qemu-utils qemu-block-extra"
# libvirt, with the same QEMU, for the guide's page about it. xmllint checks the XML there.
LIBVIRT_PACKAGES="libvirt-clients libvirt-daemon libvirt-daemon-driver-qemu libxml2-utils"
# A Ceph cluster, and the library of its clients.
CEPH_PACKAGES="ceph-common ceph-mgr ceph-mon ceph-osd librbd1"
# Tools of the guests and the tests; strace counts system calls.
PACKAGES="fio busybox-static btrfs-progs cryptsetup-bin dosfstools e2fsprogs fdisk libiscsi-bin"
PACKAGES="$PACKAGES mtools sg3-utils strace syslinux util-linux xfsprogs xz-utils zstd"
PACKAGES="$PACKAGES $CEPH_PACKAGES nbdkit nbd-server openssl prometheus socat"
# Probes in the program, and scripts that use them.
PACKAGES="$PACKAGES binutils bpftrace"
# systemd-analyze, containers with systemd, and their root.
PACKAGES="$PACKAGES mmdebstrap systemd systemd-container"
# Shells for the tests of completion, besides bash.
PACKAGES="$PACKAGES fish zsh"
# Packages and their checks, manual pages, containers.
PACKAGE_TOOLS="dpkg-dev groff lintian mandoc podman rpm runc"
PACKAGES="$PACKAGES $PACKAGE_TOOLS"
# In Debian, not in Ubuntu.
UML_PACKAGE="user-mode-linux"

# Programs that make packages, and lists of their parts. Without optimisation they take two minutes
# to build on two cores.
CARGO_TOOLS="cargo-deb@3.8.0 cargo-generate-rpm@0.21.1 cargo-cyclonedx@0.5.9"
# Adds a list of parts to the released program.
RELEASE_TOOLS="cargo-auditable@0.7.7"

# The guests' kernel, Debian's or Ubuntu's. The tests download it without installing it.
KERNEL_PACKAGES="linux-image-cloud-amd64 linux-image-virtual"

# The first QEMU with reconnect-ms, which the reconnection tests use.
QEMU_MINIMUM=9.2

die() {
    echo "setup: $*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "there is no sudo; have root run: sh xtask/setup.sh --packages"
    fi
}

# Prints the apt sources in folder $1 as lines "URI SUITE SIGNED_BY", for binary packages.
# A key inside of the sources file is printed as "inline:FILE".
list_sources() {
    for file in "$1"/sources.list "$1"/sources.list.d/*.list; do
        [ -f "$file" ] || continue
        awk '
            $1 != "deb" { next }
            {
                options = ""
                rest = substr($0, index($0, "deb") + 3)
                if (match(rest, /^[ \t]*\[[^]]*\]/)) {
                    options = substr(rest, RSTART, RLENGTH)
                    rest = substr(rest, RSTART + RLENGTH)
                }
                split(rest, part, " ")
                key = ""
                gsub(/[][]/, " ", options)
                count = split(options, option, " ")
                for (i = 1; i <= count; i++)
                    if (option[i] ~ /^signed-by=/)
                        key = substr(option[i], 11)
                print part[1], part[2], key
            }
        ' "$file"
    done
    for file in "$1"/sources.list.d/*.sources; do
        [ -f "$file" ] || continue
        awk -v file="$file" '
            function flush_stanza(    i, j, uris, suites, uri, suite, key) {
                key = field["signed-by"]
                if (key ~ /BEGIN PGP/)
                    key = "inline:" file
                gsub(/[ \t]/, "", key)
                uris = split(field["uris"], uri, " ")
                suites = split(field["suites"], suite, " ")
                if (field["types"] ~ /(^| )deb( |$)/ && tolower(field["enabled"]) !~ /no|false|0/)
                    for (i = 1; i <= uris; i++)
                        for (j = 1; j <= suites; j++)
                            print uri[i], suite[j], key
                split("", field)
            }
            /^#/ { next }
            /^[ \t]*$/ { flush_stanza(); next }
            /^[ \t]/ { field[name] = field[name] " " $0; next }
            {
                name = tolower(substr($0, 1, index($0, ":") - 1))
                field[name] = substr($0, index($0, ":") + 1)
                gsub(/^[ \t]+|[ \t]+$/, "", field[name])
            }
            END { flush_stanza() }
        ' "$file"
    done
}

# Prints the inline key of the first stanza of $1 that has one, as a field.
inline_key() {
    awk '
        tolower($0) ~ /^signed-by:/ { copying = 1; print; next }
        copying && /^[ \t]/ { print; next }
        copying { exit }
    ' "$1"
}

# Prints a sources file for the backports of release $2, from the mirror that folder $1
# configures for the release itself; nothing if the backports are configured already.
backports_source() {
    sources=$(list_sources "$1")
    if printf '%s\n' "$sources" | awk -v suite="$2-backports" '
        { sub(/\/$/, "", $2) } $2 == suite { found = 1 } END { exit !found }'
    then
        return 0
    fi
    main=$(printf '%s\n' "$sources" | awk -v suite="$2" '
        { sub(/\/$/, "", $2) } $2 == suite && $1 !~ /^cdrom:/ { print; exit }')
    [ -n "$main" ] || die "no apt source of $2 in $1; add $2-backports there and try again"
    uri=${main%% *}
    key=${main##* }
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n' "$uri" "$2-backports"
    case $key in
        inline:*) inline_key "${key#inline:}" ;;
        /*) printf 'Signed-By: %s\n' "$key" ;;
        *) ;; # No Signed-By: apt uses its trusted keys, as for the release itself.
    esac
}

enable_backports() {
    file=/etc/apt/sources.list.d/ringhaul-backports.sources
    source=$(backports_source /etc/apt "$1")
    [ -n "$source" ] || return 0
    echo "setup: enabling $1-backports in $file"
    printf '%s\n' "$source" | as_root tee "$file" >/dev/null
}

# Prints the rust-version of the workspace.
wanted_rust() {
    sed -n 's/^rust-version = "\(.*\)"/\1/p' "$(dirname "$0")/../Cargo.toml"
}

# Succeeds if version $1 is at least version $2, both in the form 1.2.3.
at_least() {
    printf '%s\n%s\n' "$2" "$1" | awk -F. '
        NR == 1 { split($0, wanted, "."); next }
        { for (i = 1; i <= 3; i++) if ($i + 0 != wanted[i] + 0) exit $i + 0 < wanted[i] + 0 }'
}

check_rust() {
    how="install it from https://rustup.rs, then open a new shell"
    command -v cargo >/dev/null || die "there is no Rust toolchain (cargo); $how"
    have=$(rustc --version | awk '{ print $2 }')
    wanted=$(wanted_rust)
    at_least "${have%%-*}" "$wanted" || die "Rust is $have, $wanted is needed; $how"
}

check_linker() {
    command -v cc >/dev/null || die "there is no C compiler (cc); install gcc and libc6-dev"
    command -v make >/dev/null || die "there is no make, which the heap (jemalloc) is built with"
}

# Installs the programs that make packages, unless these versions are there.
install_package_tools() {
    if command -v apt-get >/dev/null; then
        # shellcheck disable=SC2086 # This is a list of words.
        packages=$(missing_packages $PACKAGE_TOOLS)
        if [ -n "$packages" ]; then
            echo "setup: installing $packages"
            update_lists
            # shellcheck disable=SC2086
            apt_install $packages
        fi
    else
        echo "setup: not Debian or Ubuntu; install yourself: $PACKAGE_TOOLS"
    fi
    # shellcheck disable=SC2086
    install_cargo_tools $CARGO_TOOLS $RELEASE_TOOLS
}

# Installs these programs from crates.io, unless these versions are there.
install_cargo_tools() {
    installed=$(cargo install --list)
    for tool in "$@"; do
        case $installed in
            *"${tool%@*} v${tool#*@}:"*) ;;
            *)
                echo "setup: building $tool"
                # cargo removes a folder of its own choice only.
                env -u CARGO_TARGET_DIR -u CARGO_BUILD_TARGET_DIR \
                    cargo install --quiet --debug --locked "$tool"
                ;;
        esac
    done
}

# Adds rustfmt and clippy where a minimal toolchain lacks them.
add_rust_components() {
    for component in rustfmt clippy; do
        case $component in
            rustfmt) command="fmt" ;;
            *) command=$component ;;
        esac
        if cargo "$command" --version >/dev/null 2>&1; then
            continue
        fi
        command -v rustup >/dev/null || die "cargo $command is missing; install $component"
        echo "setup: adding the Rust component $component"
        rustup component add "$component"
    done
}

is_installed() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null || :)" = installed ]
}

# Prints the arguments that are not installed packages.
missing_packages() {
    for package in "$@"; do
        is_installed "$package" || printf '%s ' "$package"
    done
}

# Prints the QEMU packages that are not installed or, if there are backports ($1), too old.
missing_qemu() {
    for package in $QEMU_PACKAGES; do
        version=$(dpkg-query -W -f '${Version}' "$package" 2>/dev/null || :)
        if ! is_installed "$package"; then
            printf '%s ' "$package"
        elif [ -n "$1" ] && dpkg --compare-versions "$version" lt "1:$QEMU_MINIMUM"; then
            printf '%s ' "$package"
        fi
    done
}

install_packages() {
    if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
        echo "setup: not Debian or Ubuntu; install yourself: $QEMU_PACKAGES $LIBVIRT_PACKAGES" \
            "$PACKAGES"
        return 0
    fi
    # shellcheck source=/dev/null
    . /etc/os-release
    backports=
    # QEMU and libvirt of Debian 12 are too old; later releases and Ubuntu have newer ones.
    if [ "$ID" = debian ] && [ "${VERSION_ID:-}" = 12 ]; then
        backports=$VERSION_CODENAME
    fi
    packages=$PACKAGES
    [ "$ID" != debian ] || packages="$packages $UML_PACKAGE"
    command -v cc >/dev/null || packages="gcc libc6-dev $packages"
    # shellcheck disable=SC2086 # These are lists of words.
    packages=$(missing_packages $packages)
    # shellcheck disable=SC2086
    qemu=$(missing_qemu "$backports")$(missing_packages $LIBVIRT_PACKAGES)
    if [ -z "$packages$qemu" ]; then
        echo "setup: all packages are installed"
        # Container images lack apt's lists, and the tests ask apt for a kernel.
        knows_kernel || update_lists
        return 0
    fi
    echo "setup: installing $packages$qemu"
    [ -z "$qemu" ] || [ -z "$backports" ] || enable_backports "$backports"
    update_lists
    # shellcheck disable=SC2086
    [ -z "$packages" ] || apt_install $packages
    # shellcheck disable=SC2086
    [ -z "$qemu" ] || apt_install ${backports:+-t "$backports-backports"} $qemu
}

knows_kernel() {
    # shellcheck disable=SC2086
    apt-cache pkgnames linux-image- | grep -qxF "$(printf '%s\n' $KERNEL_PACKAGES)"
}

update_lists() {
    echo "setup: updating the package lists"
    # A third-party mirror that is down must not stop this; a missing package fails later.
    as_root apt-get update -qq || echo "setup: apt-get update failed; trying with the old lists"
}

# Installs packages. Debian starts the services in them, such as libvirtd and Prometheus. The tests
# have programs of their own, so the services end and stay off.
apt_install() {
    before=$(list_services)
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
        -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@"
    # Services of systemd itself, which a container may lack, are none of these.
    [ -n "$before" ] || return 0
    added=$(added_lines "$before" "$(list_services)")
    [ -n "$added" ] || return 0
    echo "setup: disabling services that came with these packages: $added"
    echo "setup: if you want one of them: systemctl enable --now NAME"
    now=
    [ ! -d /run/systemd/system ] || now=--now
    # shellcheck disable=SC2086 # These are lists of words.
    as_root systemctl disable --quiet $now $added
}

# Prints the services and sockets that start with the machine.
list_services() {
    command -v systemctl >/dev/null || return 0
    systemctl list-unit-files --no-legend --type=service,socket --state=enabled,generated |
        awk '{ print $1 }'
}

# Prints the lines of text $2 that text $1 lacks, as words.
added_lines() {
    printf '%s\n' "$2" | while read -r line; do
        printf '%s\n' "$1" | grep -qxF -e "$line" || printf '%s ' "$line"
    done
}

case ${1:-} in
    --backports)
        backports_source "$2" "$3"
        ;;
    --packages)
        install_packages
        ;;
    --package)
        check_rust
        install_package_tools
        ;;
    --rust)
        check_rust
        check_linker
        ;;
    --apt)
        shift
        apt_install "$@"
        ;;
    "")
        check_rust
        install_packages
        check_linker
        add_rust_components
        # shellcheck disable=SC2086
        install_cargo_tools $CARGO_TOOLS
        ;;
    *)
        die "unknown option $1; see the top of $0"
        ;;
esac
