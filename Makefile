# `make` lists the targets. Each is a line or two; the work is done in xtask/ and lab/.

CARGO ?= cargo
XTASK = $(CARGO) run --quiet --package xtask --
LAB = $(CARGO) run --quiet --manifest-path lab/Cargo.toml --

.DEFAULT_GOAL := help
.PHONY: help build install package demo test setup check compare experiments clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

build: rust ## Build the program, which then names its commit (ringhaul version)
	@RINGHAUL_COMMIT="$$(git describe --always --dirty 2>/dev/null)" $(CARGO) build --release

install: ## Install that program, its manual and its units (PREFIX=/usr/local, DESTDIR=)
	@PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" SYSCONFDIR="$(SYSCONFDIR)" BINARY="$(BINARY)" \
		sh contrib/install.sh

package: rust ## Make packages of Debian and RPM and a container image, in target/packages
	@sh xtask/setup.sh --package
	@sh contrib/package.sh

demo: rust ## Serve a sample disk, drive it for ten seconds, clean up; needs only Rust
	@echo "Building Ringhaul without link-time optimisation: about a minute on two cores …"
	@$(CARGO) run --quiet --profile demo --package ringhaul-cli --no-default-features -- demo

test: setup ## Install missing packages (see setup), then run every check
	@$(XTASK) check --all

setup: ## Install the requirements of the tests (with sudo when not root)
	@sh xtask/setup.sh

check: rust ## The quick checks: format, tidy, clippy, tests of units, rings, sessions
	@$(XTASK) check

compare: rust ## Measure against qemu-storage-daemon and bare fio; root for zram and loop devices
	@$(LAB) compare

experiments: rust ## Measure the value of the loop's steps; root for zram and loop devices
	@$(LAB) experiments

clean: ## Remove all build results
	@$(CARGO) clean
	@$(CARGO) clean --manifest-path lab/Cargo.toml

.PHONY: rust
rust:
	@sh xtask/setup.sh --rust
