# `make demo` shows walpost at work, `make test` checks everything. Each installs what it needs on Debian and Ubuntu.
SHELL := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin
# the features for applications
LIBRARIES := tokio-postgres,sqlx,diesel-async
.DEFAULT_GOAL := help
.PHONY: help demo test test-page test-deploy deny semver crash bench bench-drain bench-latency bench-once bench-start bench-polling bench-stages bench-retention bench-waiting fmt

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)

demo: ## Watch events travel from a private Postgres to an in-process broker, with a crash on the way
	@tests/services/setup.sh demo
	cargo build --release --bin walpost
	target/release/walpost demo

# Clippy and the documentation share what they compile of the dependencies; the tests compile the rest. The tests wait for
# servers more than they compute, hence more threads than cores.
test: export RUST_TEST_THREADS ?= 4
test: ## Format, lints, documentation, and every test against real Postgres and Kafka
	@tests/services/setup.sh test
	cargo fmt --check
	@tests/services/deny.sh
	cargo clippy --all-targets -- -D warnings
	cargo clippy --no-default-features --features $(LIBRARIES) -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --no-deps --features $(LIBRARIES)
	@tests/services/fetch.sh >/dev/null
	cargo test

test-page: ## Look at the status page in a headless Chromium; WALPOST_SCREENSHOTS=<folder> keeps pictures
	@tests/services/setup.sh page
	@tests/services/fetch.sh servers >/dev/null
	cargo clippy --test page -- -D warnings
	cargo test --test page

test-deploy: ## Render the Helm chart with helm, and let the types of the Kubernetes API read it (compiles helm once: minutes)
	@tests/services/setup.sh test
	cargo clippy --test deploy -- -D warnings
	cargo test --test deploy

deny: ## Check licences, sources and known faults of all dependencies (compiles cargo-deny once: minutes)
	@tests/services/setup.sh demo
	@tests/services/deny.sh install

semver: ## Hold the crate's public surface against the last release, or BASELINE (compiles cargo-semver-checks once: minutes)
	@tests/services/setup.sh demo
	@tests/services/semver.sh $(BASELINE)

crash: export CRASH_MINUTES ?= 10
crash: ## Break everything at random for CRASH_MINUTES (10) minutes and judge; CRASH_SEED replays, CRASH_BROKERS=3 takes three, CRASH_DELIVERY=exactly_once
	@tests/services/setup.sh servers
	@tests/services/fetch.sh servers >/dev/null
	cargo test --test crash -- --nocapture whatever

bench: bench-drain bench-latency bench-once bench-start bench-polling bench-stages bench-retention bench-waiting ## Measure everything, against pg_recvlogical, on real Postgres and Kafka

bench-drain: ## Measure a backlog's way into Kafka: rate, CPU and memory
bench-latency: ## Measure 1,000 transactions a second: insert to append in Kafka
bench-once: ## Measure exactly-once delivery beside at-least-once, as a consumer sees them
bench-start: ## Measure process start to the first record in Kafka
bench-polling: ## Measure the log against polling: 100,000 events, and latency
bench-drain bench-latency bench-once bench-start bench-polling:
	@tests/services/setup.sh servers
	@tests/services/fetch.sh kafka >/dev/null
	tests/bench/run.sh $(@:bench-%=%)

bench-retention: ## Measure inserts beside `walpost prune` of 500,000 rows: p99
	@tests/services/setup.sh test
	cargo bench --bench retention

bench-waiting: ## Measure memory and CPU with a dead broker and 10 GB of WAL waiting (takes 20 GB of disk)
	@tests/services/setup.sh servers
	@tests/services/fetch.sh servers >/dev/null
	cargo bench --bench waiting

bench-stages: ## Measure parser, encoder and tracker alone: ns an event
	@tests/services/setup.sh demo
	cargo bench --bench stages

fmt: ## Format the code
	cargo fmt
