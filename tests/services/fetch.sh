#!/bin/bash
# Fetches the servers the tests run against, and the drivers of the clients in tests/clients, and prints where they are, one
# "<name> <folder>" a line:
#   postgres-14 … postgres-18 (folder with bin/, lib/, share/) and kafka (folder with the jars);
#   prometheus (folder with prometheus and promtool: those of the machine, else of Debian's package);
#   psycopg (a PYTHONPATH), jdbc (folder with the jar), pgx (modules/ and build/: GOMODCACHE and GOCACHE) and node-pg
#   (node_modules/).
# Fetches only what is missing; a second run prints at once. Two runs at a time wait for each other.
#
#   fetch.sh             everything
#   fetch.sh servers     all servers and no driver
#   fetch.sh drivers     all drivers and no server
#   fetch.sh kafka       only what is named
#   fetch.sh helm        helm, which nothing else fetches
#
# WALPOST_TEST_CACHE says where they are kept. A server never runs as root, so what root fetches must not be in its home.
set -eu
umask 022

helm_version=3.16.4
postgres_versions='14.23.0 15.18.0 16.14.0 17.10.0 18.4.0'
here=$(cd "$(dirname "$0")" && pwd)
clients=$here/../clients
kafka_version=$(sed -n 's|.*<kafka.version>\(.*\)</kafka.version>.*|\1|p' "$here/pom.xml")
jdbc_version=$(sed -n 's|.*<jdbc.version>\(.*\)</jdbc.version>.*|\1|p' "$here/pom.xml")
psycopg_version=$(sed -n 's/^psycopg.*==//p' "$clients/python/requirements.txt")
pgx_version=$(sed -n 's|^require github.com/jackc/pgx/v5 v||p' "$clients/go/go.mod")
pg_version=$(sed -n 's/.*"pg": "\(.*\)".*/\1/p' "$clients/node/package.json")
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
    need mvn maven
    log=$(mktemp)
    if ! mvn -B -f "$here/pom.xml" "dependency:$goal" "-Dout=$out" "$@" >"$log" 2>&1; then
        grep -E 'ERROR|FATAL' "$log" | head -n 5 >&2
        rm -f "$log"
        fail "cannot fetch $*"
    fi
    rm -f "$log"
}

# need COMMAND PACKAGE
need() {
    command -v "$1" >/dev/null || fail "$1 is missing (package $2)"
}

# quietly COMMAND...: its output is shown only when it fails.
quietly() {
    local log
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "failed: $*"
    fi
    rm -f "$log"
}

fetch_postgres() {
    need xz xz-utils
    maven unpack@postgres "$2/jar" "-Dpostgres.version=$1" "-Dpostgres.arch=$arch"
    tar -xJf "$2"/jar/*.txz -C "$2"
    rm -rf "$2/jar"
}

fetch_kafka_with_tools() {
    maven copy-dependencies@kafka "$2" "-Dkafka.version=$1"
    rm -rf "$2/target"
}

# Unpacked and not installed: the package would start a server.
fetch_prometheus() {
    need apt-get 'of Debian and Ubuntu; elsewhere install Prometheus with promtool'
    need dpkg-deb dpkg
    (cd "$2" && quietly apt-get download prometheus && dpkg-deb -x prometheus_*.deb unpacked)
    mv "$2"/unpacked/usr/bin/prom* "$2"
    rm -r "$2"/unpacked "$2"/*.deb
}

fetch_jdbc() {
    maven copy@jdbc "$2" "-Djdbc.version=$1"
    rm -rf "$2/target"
}

# The wheels are for one minor version of Python.
python_version() {
    need python3 python3
    python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])'
}

fetch_psycopg() {
    quietly python3 -m pip install --no-input --no-cache-dir --target "$2" -r "$clients/python/requirements.txt"
}

# Compiles them as well, so that the tests need not. The settings are those of tests/integration/clients.rs: with others, it
# would be in vain.
fetch_pgx() {
    need go golang-go
    (
        export GOMODCACHE=$2/modules GOCACHE=$2/build GOFLAGS='-modcacherw -trimpath -buildvcs=false'
        export CGO_ENABLED=0 GOTOOLCHAIN=local GOWORK=off
        cd "$clients/go"
        quietly go build -o "$2/client" .
    )
    rm "$2/client"
}

fetch_pg() {
    need npm npm
    cp "$clients/node/package.json" "$clients/node/package-lock.json" "$2"
    quietly npm ci --prefix "$2" --ignore-scripts --no-audit --no-fund --no-update-notifier
}

# For tests/deploy alone, since it takes minutes to compile.
fetch_helm() {
    need go golang-go
    GOBIN=$2 GOFLAGS=-modcacherw quietly go install "helm.sh/helm/v3/cmd/helm@v$1"
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
    [ -z "$only" ] || [ "$only" = "$1" ] || [ "$only" = "$2" ]
}

only=${1:-}
for version in $postgres_versions; do
    if wanted "postgres-${version%%.*}" servers; then provide "postgres-${version%%.*}" postgres "$version"; fi
done
if wanted prometheus servers; then
    if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
        echo "prometheus $(dirname "$(command -v promtool)")"
    else
        provide prometheus prometheus debian
    fi
fi
if wanted kafka servers; then provide kafka kafka_with_tools "$kafka_version"; fi
if wanted jdbc drivers; then provide jdbc jdbc "$jdbc_version"; fi
if wanted psycopg drivers; then
    python=$(python_version)
    provide psycopg psycopg "$psycopg_version-$python"
fi
if wanted pgx drivers; then provide pgx pgx "$pgx_version"; fi
if wanted node-pg drivers; then provide node-pg pg "$pg_version"; fi
if [ "$only" = helm ]; then provide helm helm "$helm_version"; fi
