#!/bin/bash
# Fetches the servers the tests run against, and prints where they are, one "<name> <folder>" a line:
#   postgres-14 … postgres-18 (folder with bin/, lib/, share/) and kafka (folder with the jars).
# Fetches only what is missing; a second run prints at once. Two runs at a time wait for each other.
#
#   fetch.sh             everything
#   fetch.sh kafka       only what is named
#
# WALPOST_TEST_CACHE says where they are kept. A server never runs as root, so what root fetches must not be in its home.
set -eu
umask 022

postgres_versions='14.23.0 15.18.0 16.14.0 17.10.0 18.4.0'
here=$(cd "$(dirname "$0")" && pwd)
kafka_version=$(sed -n 's|.*<kafka.version>\(.*\)</kafka.version>.*|\1|p' "$here/pom.xml")
if [ -n "${WALPOST_TEST_CACHE:-}" ]; then
    cache=$WALPOST_TEST_CACHE
elif [ "$(id -u)" = 0 ]; then
    cache=/var/cache/walpost-tests
else
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/walpost-tests
fi

fail() {
    echo "fetch.sh: $*" >&2
    exit 1
}

case $(uname -sm) in
    'Linux x86_64') arch=amd64 ;;
    'Linux aarch64') arch=arm64v8 ;;
    *) fail "the test servers exist for Linux on x86_64 and aarch64, not for $(uname -sm)" ;;
esac

# maven GOAL OUT PROPERTY...: runs one goal of pom.xml, its log shown only when it fails.
maven() {
    local goal=$1 out=$2 log
    shift 2
    command -v mvn >/dev/null || fail 'mvn is missing (package maven)'
    log=$(mktemp)
    if ! mvn -B -f "$here/pom.xml" "dependency:$goal" "-Dout=$out" "$@" >"$log" 2>&1; then
        grep -E 'ERROR|FATAL' "$log" | head -n 5 >&2
        rm -f "$log"
        fail "cannot fetch $*"
    fi
    rm -f "$log"
}

fetch_postgres() {
    command -v xz >/dev/null || fail 'xz is missing (package xz-utils)'
    maven unpack@postgres "$2/jar" "-Dpostgres.version=$1" "-Dpostgres.arch=$arch"
    tar -xJf "$2"/jar/*.txz -C "$2"
    rm -rf "$2/jar"
}

fetch_kafka() {
    maven copy-dependencies@kafka "$2" "-Dkafka.version=$1"
    rm -rf "$2/target"
}

# provide NAME KIND VERSION: a folder appears under its final name only when it is complete.
provide() {
    local name=$1 kind=$2 version=$3 folder=$cache/$2-$3-$arch part
    if [ ! -d "$folder" ]; then
        mkdir -p "$cache"
        exec 9>"$cache/lock"
        flock 9
        if [ ! -d "$folder" ]; then
            echo "fetching $kind $version into $cache" >&2
            rm -rf "$cache"/.part-* # left by a fetch that was killed: we hold the lock
            part=$(mktemp -d "$cache/.part-XXXXXX")
            # shellcheck disable=SC2064 # the path of now is meant
            trap "rm -rf '$part'" EXIT
            chmod 755 "$part"
            "fetch_$kind" "$version" "$part"
            mv "$part" "$folder"
            trap - EXIT
        fi
        exec 9>&-
    fi
    echo "$name $folder"
}

wanted() {
    [ -z "$only" ] || [ "$only" = "$1" ]
}

only=${1:-}
for version in $postgres_versions; do
    if wanted "postgres-${version%%.*}"; then provide "postgres-${version%%.*}" postgres "$version"; fi
done
if wanted kafka; then provide kafka kafka "$kafka_version"; fi
