#!/bin/bash
# Makes a Debian package of a binary that is built already: build.sh BINARY [FOLDER]
#
# The package has the binary, the systemd unit, settings under /etc, man pages and completions. Prints the package's name.
# The same binary gives the same package, byte for byte. DEB_COMPRESSION (default -Zxz) is handed to dpkg-deb.
set -eu
cd "$(dirname "$0")/../.."
if [ $# -lt 1 ] || [ ! -x "$1" ]; then
    echo 'usage: deploy/debian/build.sh BINARY [FOLDER]; build one first: cargo build --release --bin walpost' >&2
    exit 2
fi
binary=$(realpath "$1")
out=$(realpath "${2:-.}")
version=$("$binary" --version | cut -d' ' -f2)
architecture=$(dpkg --print-architecture)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
export SOURCE_DATE_EPOCH
umask 022

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root

put() { # put MODE SOURCE TARGET
    install -D -m "$1" "$2" "$root/$3"
}

zip_in_place() {
    gzip -9n "$@"
}

put 755 "$binary" usr/bin/walpost
strip --strip-all "$root/usr/bin/walpost"
put 644 deploy/systemd/walpost.service usr/lib/systemd/system/walpost.service
put 644 deploy/debian/sysusers.conf usr/lib/sysusers.d/walpost.conf
put 640 deploy/walpost.example.toml etc/walpost/walpost.toml
put 640 deploy/debian/default etc/default/walpost
doc=usr/share/doc/walpost
put 644 deploy/debian/copyright $doc/copyright
put 644 README.md $doc/README.md
put 644 CHANGELOG.md $doc/changelog
for file in sql/*.sql; do put 644 "$file" "$doc/$file"; done
zip_in_place "$root/$doc/changelog"
"$binary" generate man "$root/usr/share/man/man1"
zip_in_place "$root"/usr/share/man/man1/*.1
"$binary" generate completions "$work/completions"
put 644 "$work/completions/walpost.bash" usr/share/bash-completion/completions/walpost
put 644 "$work/completions/_walpost" usr/share/zsh/vendor-completions/_walpost
put 644 "$work/completions/walpost.fish" usr/share/fish/vendor_completions.d/walpost.fish

# what the binary asks of the system
depends=libgcc-s1
glibc=$(objdump -T "$binary" | sed -n 's/.*(\{0,1\}GLIBC_\([0-9.]*\).*/\1/p' | sort -Vu | tail -n 1)
depends="libc6 (>= $glibc), $depends"
if objdump -p "$binary" | grep -q 'NEEDED *libssl.so.3'; then depends="$depends, libssl3 | libssl3t64"; fi

mkdir -p "$root/DEBIAN"
size=$(du -sk --apparent-size "$root" | cut -f1)
sed -e "s/@VERSION@/$version/; s/@ARCHITECTURE@/$architecture/; s/@SIZE@/$size/; s/@DEPENDS@/$depends/" \
    deploy/debian/control >"$root/DEBIAN/control"
printf '/etc/walpost/walpost.toml\n/etc/default/walpost\n' >"$root/DEBIAN/conffiles"
for script in postinst prerm postrm; do put 755 "deploy/debian/$script" "DEBIAN/$script"; done
(cd "$root" && find . -type f ! -path './DEBIAN/*' ! -path './etc/*' -printf '%P\n' | LC_ALL=C sort | xargs md5sum) >"$work/md5sums"
put 644 "$work/md5sums" DEBIAN/md5sums
# the files' own times differ from run to run
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

package=$out/walpost_${version}_$architecture.deb
# shellcheck disable=SC2086 # several words are several options
dpkg-deb ${DEB_COMPRESSION:--Zxz} --root-owner-group --build "$root" "$package" >&2
echo "$package"
