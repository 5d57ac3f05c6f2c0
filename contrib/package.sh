#!/bin/sh
# Makes the packages of Debian and RPM, and an image for containers: `make package`.
#
#   contrib/package.sh [deb] [rpm] [oci]      all of them by default
#
#   BINARY    the program; it is built, with a list of its parts inside, if that is not set
#   OUT       the folder of the results: packages in the target directory, by default
#   REVISION  the revision of the package of Debian; 1 by default
#   FAST      if it is set, packages are larger and take less time
#   BASE      the base of the image; docker.io/library/debian:bookworm-slim by default
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-$PWD/target}
OUT=${OUT:-$target/packages}
[ $# -gt 0 ] || set -- deb rpm oci
mkdir -p "$OUT"
scratch=$(mktemp -d "$OUT/.work-XXXXXX")
trap 'rm -rf "$scratch"' EXIT

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
# The time of the newest commit: the same source makes the same packages.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

if [ -z "${BINARY:-}" ]; then
    RINGHAUL_COMMIT=$(git describe --always --dirty 2>/dev/null || echo unknown)
    export RINGHAUL_COMMIT
    cargo auditable build --release --locked --package ringhaul-cli
    BINARY=$target/release/ringhaul
    is_auditable=yes
fi

# The files, where both tools look for build results.
CARGO_TARGET_DIR=$scratch
export CARGO_TARGET_DIR
stage=$scratch/release/package
strip -o "$scratch/ringhaul" "$BINARY"
has_list() {
    readelf --sections --wide "$1" | grep -q dep-v0
}
if [ -n "${is_auditable:-}" ] && ! has_list "$scratch/ringhaul"; then
    echo "package: the program has no list of its dependencies; is cargo-auditable too old?" >&2
    exit 1
fi
PREFIX=/usr SYSCONFDIR=/etc DESTDIR=$stage BINARY=$scratch/ringhaul sh contrib/install.sh
install -D -m 644 contrib/packages/needrestart.conf "$stage/etc/needrestart/conf.d/ringhaul.conf"
gzip -9n < CHANGELOG.md > "$stage/usr/share/doc/ringhaul/changelog.gz"
find "$stage/usr/share/man" -type f -exec gzip -9n {} +

# The parts of the program with versions and licences, as CycloneDX. The tool writes into the folder
# of each crate, so it works on a copy.
mkdir "$scratch/tree"
cp -R Cargo.toml Cargo.lock .cargo crates tests tools xtask "$scratch/tree/"
cargo cyclonedx --quiet --format json --override-filename ringhaul.cdx \
    --manifest-path "$scratch/tree/crates/ringhaul-cli/Cargo.toml"
sed "s|$scratch/tree|/ringhaul|g" "$scratch/tree/crates/ringhaul-cli/ringhaul.cdx.json" \
    > "$stage/usr/share/doc/ringhaul/ringhaul.cdx.json"
cp "$stage/usr/share/doc/ringhaul/ringhaul.cdx.json" "$OUT/ringhaul-$version.$(uname -m).cdx.json"

make_deb() {
    install -D -m 644 contrib/packages/debian/copyright "$scratch/release/debian/copyright"
    {
        echo "ringhaul ($version-${REVISION:-1}) unstable; urgency=medium"
        echo
        echo "  * New release; see /usr/share/doc/ringhaul/changelog.gz."
        echo
        echo " -- $(maintainer)  $(date -R -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n > "$scratch/release/debian/changelog.Debian.gz"
    cargo deb --quiet --no-build --no-strip --manifest-path crates/ringhaul-cli/Cargo.toml \
        --deb-revision "${REVISION:-1}" ${FAST:+--fast} --output "$OUT/"
}

maintainer() {
    sed -n 's/^maintainer = "\(.*\)"/\1/p' crates/ringhaul-cli/Cargo.toml
}

make_rpm() {
    install -D -m 644 -t "$stage/usr/share/licenses/ringhaul" LICENSE-APACHE LICENSE-MIT
    cargo generate-rpm --package crates/ringhaul-cli --target-dir "$scratch" \
        ${FAST:+--payload-compress none} --output "$OUT/"
}

make_oci() {
    context=$scratch/context
    mkdir -p "$context/empty"
    cp "$scratch/ringhaul" contrib/systemd/ringhaul.toml contrib/oci/Containerfile "$context/"
    cp LICENSE-APACHE LICENSE-MIT "$context/"
    # The form of Docker has health checks, which that of OCI lacks.
    podman build --quiet --format docker ${BASE:+--build-arg BASE="$BASE"} \
        --label "org.opencontainers.image.version=$version" \
        --tag "localhost/ringhaul:$version" "$context"
    archive=$OUT/ringhaul-$version.$(uname -m).tar
    rm -f "$archive"
    podman save --quiet --output "$archive" "localhost/ringhaul:$version"
}

for kind; do
    case $kind in
    deb | rpm | oci) "make_$kind" ;;
    *) echo "package: there is no kind $kind; kinds are deb, rpm and oci" >&2; exit 2 ;;
    esac
done
ls -l "$OUT"
