#!/bin/bash
# Measures the release build side by side with pg_recvlogical: run.sh [drain|latency|once|start|all] [--rounds N]
#
# Other builds or settings, in the same go:  run.sh drain old=/tmp/walpost new=target/release/walpost \
#   linger=target/release/walpost,WALPOST_KAFKA_PROPERTIES_LINGER_MS=5
set -eu
cd "$(dirname "$0")/../.."
cargo build --release --bin walpost
# the program that measures need not be fast itself
cargo bench --profile dev --bench compare -- "$@"
