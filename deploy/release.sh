#!/bin/bash
# Makes what a release consists of: release.sh [FOLDER] (default target/release-files)
#
#   walpost-VERSION-TARGET.tar.gz   binary, man pages, completions, settings, unit, SQL, licences
#   walpost_VERSION_ARCH.deb
#   walpost-VERSION.cdx.json        the SBOM (CycloneDX)
#   NOTES.md                        this version's section of the changelog
#   SHA256SUMS
#
# The build is reproducible: same commit, same toolchain, same files. WALPOST_BINARY names a binary that is built already; then
# nothing is compiled.
set -eu
cd "$(dirname "$0")/.."
out=${1:-target/release-files}
mkdir -p "$out"
out=$(realpath "$out")
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
target=$(rustc -vV | sed -n 's/^host: //p')
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
umask 022

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() {
    # neither this folder nor the home may be in the binary
    export RUSTFLAGS="--remap-path-prefix=$PWD=/walpost --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
    export CFLAGS="-ffile-prefix-map=$PWD=/walpost -ffile-prefix-map=${CARGO_HOME:-$HOME/.cargo}=/cargo"
    export CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_INCREMENTAL=0
    cargo build --release --locked --bin walpost --features vendored-openssl >&2
    echo target/release/walpost
}

notes() {
    # from the heading of this version, else of what is unreleased, to the next
    local heading=$version
    grep -q "^## \[$version\]" CHANGELOG.md || heading=Unreleased
    awk -v wanted="## [$heading]" 'index($0, wanted) == 1 { on = 1; next } /^## \[/ { on = 0 } on' CHANGELOG.md
}

archive() {
    local name=walpost-$version-$target
    local folder=$work/$name
    install -D -m 755 "$binary" "$folder/walpost"
    "$binary" generate man "$folder/man"
    "$binary" generate completions "$folder/completions"
    cp README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT deploy/walpost.example.toml deploy/systemd/walpost.service "$folder"
    cp -r sql "$folder"
    tar --create --directory "$work" --sort=name --owner=0 --group=0 --numeric-owner --mode=go=rX,u+rw \
        --mtime="@$SOURCE_DATE_EPOCH" "$name" | gzip -9n >"$out/$name.tar.gz"
}

binary=${WALPOST_BINARY:-$(build)}
binary=$(realpath "$binary")
if [ "$("$binary" --version)" != "walpost $version" ]; then
    echo "release: $binary is $("$binary" --version), and Cargo.toml says $version: build it anew" >&2
    exit 1
fi
archive
deploy/debian/build.sh "$binary" "$out" >/dev/null
python3 deploy/sbom.py --features vendored-openssl --target "$target" >"$out/walpost-$version.cdx.json"
notes >"$out/NOTES.md"
(cd "$out" && sha256sum -- *.tar.gz *.deb *.cdx.json NOTES.md >SHA256SUMS)
cat "$out/SHA256SUMS"
