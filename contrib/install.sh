#!/bin/sh
# Installs the program and its files: `make install` after `make build`.
#   PREFIX      /usr/local by default; packages use /usr
#   SYSCONFDIR  /etc by default, for the configuration file, which is kept if it exists
#   DESTDIR     a folder that stands for / in packages
#   BINARY      the program, by default that of `make build`
set -eu
cd "$(dirname "$0")/.."
PREFIX=${PREFIX:-/usr/local}
SYSCONFDIR=${SYSCONFDIR:-/etc}
DESTDIR=${DESTDIR:-}
BINARY=${BINARY:-${CARGO_TARGET_DIR:-target}/release/ringhaul}
for folder in "$PREFIX" "$SYSCONFDIR" "${DESTDIR:-/}"; do
    case $folder in
    /*) ;;
    *) echo "install: PREFIX, SYSCONFDIR and DESTDIR are absolute paths, not $folder" >&2; exit 2 ;;
    esac
done
if [ ! -x "$BINARY" ]; then
    echo "install: there is no program $BINARY; run \`make build\` before" >&2
    exit 2
fi

bin=$DESTDIR$PREFIX/bin
lib=$DESTDIR$PREFIX/lib
share=$DESTDIR$PREFIX/share
# Packages have a folder of completions of their own.
case $PREFIX in
/usr) zsh=vendor-completions ;;
*) zsh=site-functions ;;
esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Installs a file that names the program, with the folder of the program.
put() {
    sed "s|/usr/bin/|$PREFIX/bin/|g" "$1" > "$scratch/file"
    install -D -m 644 "$scratch/file" "$2"
}

install -D -m 755 "$BINARY" "$bin/ringhaul"
install -D -m 755 contrib/ringhaul-scsi "$bin/ringhaul-scsi"
mkdir "$scratch/manual"
"$BINARY" manual "$scratch/manual"
for page in "$scratch"/manual/*; do
    install -D -m 644 "$page" "$share/man/man${page##*.}/${page##*/}"
done
"$BINARY" completions bash > "$scratch/bash"
"$BINARY" completions zsh > "$scratch/zsh"
"$BINARY" completions fish > "$scratch/fish"
install -D -m 644 "$scratch/bash" "$share/bash-completion/completions/ringhaul"
install -D -m 644 "$scratch/zsh" "$share/zsh/$zsh/_ringhaul"
install -D -m 644 "$scratch/fish" "$share/fish/vendor_completions.d/ringhaul.fish"
put contrib/50-ringhaul.json "$share/qemu/vhost-user/50-ringhaul.json"
put contrib/50-ringhaul-scsi.json "$share/qemu/vhost-user/50-ringhaul-scsi.json"
put contrib/systemd/ringhaul.service "$lib/systemd/system/ringhaul.service"
put contrib/systemd/ringhaul@.service "$lib/systemd/system/ringhaul@.service"
put contrib/packages/upgrade-services "$lib/ringhaul/upgrade-services"
chmod 755 "$lib/ringhaul/upgrade-services"
put contrib/systemd/sysusers.conf "$lib/sysusers.d/ringhaul.conf"
put contrib/systemd/tmpfiles.conf "$lib/tmpfiles.d/ringhaul.conf"
for file in block-devices network-disks watchdog; do
    put "contrib/systemd/$file.conf" "$share/doc/ringhaul/$file.conf"
done
for file in alerts.yml dashboard.json; do
    put "contrib/monitoring/$file" "$share/doc/ringhaul/$file"
done
# The pages that messages of the program name.
find docs -type f | while read -r file; do
    install -D -m 644 "$file" "$share/doc/ringhaul/$file"
done
for file in contrib/bpftrace/*; do
    install -D -m 755 "$file" "$share/ringhaul/${file##*/}"
done
configuration=$DESTDIR$SYSCONFDIR/ringhaul.toml
[ -e "$configuration" ] || put contrib/systemd/ringhaul.toml "$configuration"
if [ -z "$DESTDIR" ]; then
    echo "Installed in $PREFIX. For the units, as root: systemd-sysusers ringhaul.conf &&"
    echo "systemd-tmpfiles --create ringhaul.conf && systemctl daemon-reload"
fi
