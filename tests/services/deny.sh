#!/bin/bash
# Checks licences, sources and bans of everything we depend on (deny.toml), and known faults where their list can be fetched.
#   deny.sh: where cargo-deny is there; deny.sh install: compiles it first, which takes minutes
set -eu
cd "$(dirname "$0")/../.."
if ! command -v cargo-deny >/dev/null; then
    if [ "${1:-}" != install ]; then
        echo "cargo-deny is not there, so dependencies are not checked: make deny compiles it and does"
        exit
    fi
    cargo install --locked cargo-deny
fi
cargo deny --log-level error check bans licenses sources
if cargo deny --log-level error fetch db 2>/dev/null; then
    cargo deny --log-level error check advisories
else
    echo "the list of known faults (RustSec) cannot be fetched, so it is not looked at"
fi
