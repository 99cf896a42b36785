#!/bin/bash
# Installs what the machine lacks, and only that: setup.sh demo | servers | page | test
#   demo: to build and run walpost; servers: to run Kafka and other Postgres majors as well; page: and a browser; test: to
#   run everything but the browser.
#
# On Debian and Ubuntu by apt, without a question; elsewhere it names what is missing and fails. Never starts or touches a
# Postgres cluster of the machine's own.
set -eu
cd "$(dirname "$0")/../.."
purpose=${1:-test}
export DEBIAN_FRONTEND=noninteractive RUSTUP_AUTO_INSTALL=0

packages=() # to install
missing=()  # the same, said for people without apt

lack() {
    packages+=("$1")
    missing+=("$2")
}

has() {
    command -v "$1" >/dev/null
}

java_major() {
    local major
    major=$(java -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p')
    echo "${major:-0}"
}

# java_package jre | jdk
java_package() {
    local major
    for major in 21 17 25; do
        if apt-cache show "openjdk-$major-$1-headless" >/dev/null 2>&1; then
            echo "openjdk-$major-$1-headless"
            return
        fi
    done
    echo "default-$1-headless"
}

# The languages of the clients. Their drivers are fetched by fetch.sh.
find_lacks_of_clients() {
    if has java && [ "$(java_major)" -ge 17 ] && ! java --list-modules | grep -q '^jdk.compiler'; then
        lack JDK 'the Java compiler (a JDK rather than a JRE)'
    fi
    has python3 || lack python3 'Python 3.10 or later'
    python3 -m pip --version >/dev/null 2>&1 || lack python3-pip 'pip for Python 3'
    has go || lack golang-go 'Go 1.19 or later'
    has node || lack nodejs 'Node 16 or later'
    has npm || lack npm npm
}

find_lacks() {
    if ! { has cc && has c++ && has make; }; then lack build-essential 'a C and C++ compiler and make'; fi
    has pkg-config || lack pkg-config pkg-config
    pkg-config --exists openssl 2>/dev/null || lack libssl-dev 'the headers of OpenSSL'
    [ -e /etc/ssl/certs/ca-certificates.crt ] || lack ca-certificates 'CA certificates'
    has initdb || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || lack postgresql 'a Postgres server'
    if [ "$purpose" != demo ]; then
        if ! has java || [ "$(java_major)" -lt 17 ]; then lack "$java" 'Java 17 or later'; fi
        has mvn || lack maven Maven
        has xz || lack xz-utils xz
    fi
    if [ "$purpose" = page ]; then has chromium || lack chromium Chromium; fi
    if [ "$purpose" = test ]; then
        find_lacks_of_clients
        has dpkg || lack dpkg dpkg
        compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || lack libfaketime libfaketime
        [ "$(id -u)" = 0 ] || has fakeroot || lack fakeroot fakeroot
    fi
    has cargo || has rustup || lack rustup "Rust $toolchain (https://rustup.rs)"
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

# Says what it lacks, for a machine where we cannot help.
give_up() {
    printf 'setup: missing: %s\n' "${missing[@]}" >&2
    fail "$*"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n --preserve-env=DEBIAN_FRONTEND "$@"; fi
}

# Quiet unless it fails. --no-remove: nothing of the machine's own may go.
apt_get() {
    local log
    log=$(mktemp)
    if ! as_root apt-get -qq -o Dpkg::Use-Pty=0 --no-remove --no-install-recommends "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        give_up "apt-get $* failed"
    fi
    rm -f "$log"
}

install_packages() {
    has apt-get || give_up 'this is neither Debian nor Ubuntu: install these first'
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null || give_up 'neither root nor sudo without a password: install these first'
    apt_get update
    local i
    for i in "${!packages[@]}"; do
        case ${packages[i]} in JRE | JDK) packages[i]=$(java_package "${packages[i],,}") ;; esac
        apt-cache show "${packages[i]}" >/dev/null 2>&1 || give_up "no package ${packages[i]} here: install that first"
    done
    echo "setup: installing by apt: ${packages[*]}"
    case " ${packages[*]} " in
        *' postgresql '*) without_packaged_cluster apt_get install "${packages[@]}" ;;
        *) apt_get install "${packages[@]}" ;;
    esac
}

# The package would create a cluster and start it at every boot; we want the programs alone.
without_packaged_cluster() {
    local conf=/etc/postgresql-common/createcluster.conf
    apt_get install postgresql-common
    as_root cp -p "$conf" "$conf.before-walpost"
    echo 'create_main_cluster = false' | as_root tee -a "$conf" >/dev/null
    "$@"
    as_root mv "$conf.before-walpost" "$conf"
}

# Cargo itself, and the components that `make test` uses. Some rustup would install a toolchain, unannounced, when asked.
rust_is_complete() {
    if has rustup; then rustup toolchain list | grep -q "^$toolchain" || return 1; fi
    cargo --version && { [ "$purpose" != test ] || { cargo fmt --version && cargo clippy --version; }; }
} >/dev/null 2>&1

install_toolchain() {
    rust_is_complete && return
    has rustup || fail "this cargo lacks rustfmt or clippy: install them, or Rust $toolchain by https://rustup.rs"
    echo "setup: installing Rust $toolchain by rustup"
    rustup -q toolchain install "$toolchain" --profile minimal --component rustfmt --component clippy ||
        fail "rustup could not install Rust $toolchain"
}

# A cargo that knows no toolchain file must be new enough by itself.
check_version() {
    local found
    found=$(cargo --version | cut -d' ' -f2)
    printf '%s\n%s\n' "$toolchain" "$found" | sort -VC || fail "Rust $toolchain is needed, this is $found: https://rustup.rs"
}

java=JRE
if [ "$purpose" = test ]; then java=JDK; fi
toolchain=$(sed -n 's/^channel *= *"\(.*\)"/\1/p' rust-toolchain.toml)
find_lacks
if [ ${#packages[@]} -gt 0 ]; then install_packages; fi
install_toolchain
check_version
