#!/bin/bash
# Holds the crate's public surface against the last release's: what would break those who build on it needs a new major version
# (or minor one, before 1.0).
#   semver.sh [BASELINE]: a revision other than the last release's tag
set -eu
cd "$(dirname "$0")/../.."
baseline=${1:-$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)}
if [ -z "$baseline" ]; then
    echo "nothing was released yet, so there is no public surface to keep; make semver BASELINE=<revision> compares with that"
    exit
fi
command -v cargo-semver-checks >/dev/null || cargo install --locked cargo-semver-checks
cargo semver-checks --baseline-rev "$baseline" --features tokio-postgres,sqlx,diesel-async
