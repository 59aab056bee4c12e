# Run `make` alone for the list of targets.

PYTHON ?= $(firstword $(shell command -v python3.11 python3 2>/dev/null) python3)
# One that is asked for is used, and a .venv of another version made anew; the default takes the .venv that is there.
ASKED_FOR = $(filter-out file,$(origin PYTHON))
version = $(shell "$(1)" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
same = $(filter $(call version,$(1)),$(call version,$(2)))
OTHER_PYTHON = $(if $(and $(ASKED_FOR),$(wildcard .venv)),$(if $(call same,$(PYTHON),.venv/bin/python),,other-python))
# Called by `python -I`: what PYTHONPATH names is not installed, though pip would see it.
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check -c constraints.txt

# What `make install` writes, and where. DESTDIR is not supported: a virtual environment knows its own path.
PREFIX ?= /opt/millpond
BINDIR ?= /usr/local/bin
# mount(8) looks for mount.millpond in /sbin alone.
SBINDIR ?= $(if $(filter /usr/local/bin,$(BINDIR)),/usr/sbin,$(BINDIR))
UNITDIR ?= /etc/systemd/system
CONFDIR ?= /etc/millpond
SHAREDIR ?= /usr/local/share
EXTRAS ?= agent,train
BOARD ?= qemu-virt

UNITS = host/millpond-host.service agent/millpond-agent.service
COMMANDS = millpond millpond-agent mount.millpond
STAMP = .venv/.millpond-installed
COVERAGE_STAMP = .venv/.millpond-coverage
DOCS_STAMP = .venv/.millpond-docs
RELEASE_STAMP = .venv/.millpond-release
FLOWER_STAMP = .flower/.millpond-installed
FLOWER_PINS = host/templates/federate/requirements.txt

# Of make's command line alone: a variable of the environment changes no run.
ARGS =
EFFORT = quick
# Of what `make test-wheel` tries.
RELEASES = bookworm noble trixie
# --rerun: tests that fail run once more at the end (see tests/run.py).
RERUN =

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-bench coverage check reference docs screenshots guest install uninstall clean system bench-tunnel bench-balance bench-volume bench-train bench-task bench-aggregate bench-data bench-people bench-hosts bench-privacy papers conformance flower
.PHONY: image image-lock qemu test-image bench-image other-python
.PHONY: manual wheels deb test-wheel test-deb release

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) system  ## an emulated fleet trains on real data, on this machine alone
	@.venv/bin/millpond demo

test: $(STAMP) system  ## the tests, each with few repetitions (ARGS="tests/fs -k lease")
	@.venv/bin/python tests/run.py quick $(ARGS)

test-all: $(STAMP) system  ## the tests with all their repetitions, and in the guest if it is built (ARGS=-x)
	@images/prerequisites.sh tests
	@.venv/bin/python tests/run.py $(strip $(RERUN) full) $(ARGS)

test-bench: $(STAMP) system  ## the shortest form of each experiment of each benchmark
	@images/prerequisites.sh tests
	@.venv/bin/python tests/run.py bench tests/bench $(ARGS)

coverage: $(COVERAGE_STAMP) system  ## which lines of the product the tests run (EFFORT=full ARGS=tests/fs)
	@# Every process writes into /tmp when it ends. A sandboxed one has another uid, and may write there; one that
	@# has another root directory has a /tmp of its own, and what it has measured is lost without a word.
	@rm -rf .coverage-data && mkdir .coverage-data
	@data=$$(mktemp -u /tmp/millpond-coverage-XXXXXX); \
	  COVERAGE_FILE=$$data .venv/bin/python tests/run.py --coverage $(EFFORT) $(ARGS); result=$$?; \
	  COVERAGE_FILE=$$data .venv/bin/coverage combine --quiet && mv $$data .coverage-data/data && \
	  .venv/bin/coverage report && exit $$result

check: $(STAMP)  ## style, types, layers and house rules
	@# Its cache does not notice when an imported module has become one of ours.
	@.venv/bin/ruff check --no-cache
	@.venv/bin/ruff format --check
	@.venv/bin/mypy
	@# With the package loaded, as its folders are joined when it is.
	@.venv/bin/python -c 'import millpond; from importlinter.cli import lint_imports_command as lint; lint()'
	@.venv/bin/pytest tests/rules -q
	@PYTHONPATH=tests .venv/bin/python -m documents check

reference: $(STAMP)  ## writes what in docs/ follows from the code, and the figures of docs/bench
	@PYTHONPATH=tests .venv/bin/python -m documents write

docs: reference $(DOCS_STAMP)  ## the site of the documents, in .site/html, with the reference as the code has it
	@PYTHONPATH=tests .venv/bin/python -m documents lay-out
	@.venv/bin/zensical build --clean --strict
	@PYTHONPATH=tests .venv/bin/python -m documents look
	@echo "millpond: the site begins with .site/html/index.html"

screenshots: $(STAMP) system  ## pictures of the dashboard and a recording of top for docs/how-to
	@images/prerequisites.sh tests
	@PYTHONPATH=tests .venv/bin/python -m documents.screenshots

guest: $(STAMP)  ## a small Debian for those tests that need a machine of their own, in .guest
	@images/prerequisites.sh guest
	@PYTHONPATH=tests .venv/bin/python -m guest.build .guest

image: $(STAMP)  ## the agent image for BOARD, qemu-virt if left out, in .image (IMAGE_ARGS=--help)
	@images/prerequisites.sh image
	@.venv/bin/python -m millpond.images.build --board $(BOARD) $(IMAGE_ARGS)

image-lock: $(STAMP)  ## the versions of all packages of images, as Debian and the registry have them today
	@images/prerequisites.sh image
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check uv
	@PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python -m millpond.images.build --lock

qemu: $(STAMP) system image  ## a fleet of three emulated devices and one in QEMU from the image, until Ctrl-C
	@images/prerequisites.sh qemu
	@.venv/bin/millpond emulate --fleet .image/fleet --qemu 1

test-image: $(STAMP) system image  ## boots the image in QEMU, trains on it, updates it and cuts its power (ARGS=-x)
	@images/prerequisites.sh qemu
	@.venv/bin/pytest tests/image --image .image/qemu-virt $(ARGS)

bench-image: $(STAMP) system image  ## sizes and times of the image: a table and .bench/image.json (ARGS=--help)
	@images/prerequisites.sh qemu
	@PYTHONPATH=tests .venv/bin/python -m bench.image $(ARGS)

bench-tunnel: $(STAMP) system  ## the tunnel against its peers: a table, .bench/tunnel.json and a picture (ARGS=--help)
	@images/prerequisites.sh bench
	@PYTHONPATH=tests .venv/bin/python -m bench.tunnel $(ARGS)

bench-balance: $(STAMP) system  ## what unequal devices reach of what they could: tables, .bench/balance.json, a picture
	@PYTHONPATH=tests .venv/bin/python -m bench.balance $(ARGS)

bench-volume: $(STAMP) system  ## the volume's mounts against their peers: tables, .bench/volume.json, a picture
	@images/prerequisites.sh bench
	@PYTHONPATH=tests .venv/bin/python -m bench.volume $(ARGS)

bench-train: $(STAMP) system  ## what a round costs beside its computation: tables and .bench/train.json (ARGS=--help)
	@PYTHONPATH=tests .venv/bin/python -m bench.train $(ARGS)

bench-task: $(STAMP) system  ## what tasks, large data and adapters cost: tables and .bench/task.json (ARGS=--help)
	@PYTHONPATH=tests .venv/bin/python -m bench.task $(ARGS)

bench-aggregate: $(STAMP) system  ## what aggregations cost: tables and .bench/aggregate.json (ARGS=--help)
	@PYTHONPATH=tests .venv/bin/python -m bench.aggregate $(ARGS)

bench-data: $(STAMP) system  ## what data in a slow tier costs: tables and .bench/data.json (ARGS=--help)
	@PYTHONPATH=tests .venv/bin/python -m bench.data $(ARGS)

bench-people: $(STAMP) system  ## what it costs to look at a fleet of 64: tables and .bench/people.json (ARGS=--help)
	@PYTHONPATH=tests .venv/bin/python -m bench.people $(ARGS)

bench-hosts: $(STAMP) $(FLOWER_STAMP) system  ## several hosts that train one model: tables and .bench/hosts.json (ARGS=--help)
	@PYTHONPATH=tests .venv/bin/python -m bench.hosts $(ARGS)

bench-privacy: $(STAMP) system  ## attacks on what leaves a device, at each level: tables and .bench/privacy.json (ARGS=--help)
	@PYTHONPATH=tests .venv/bin/python -m bench.privacy $(ARGS)

papers: $(STAMP) system  ## the papers' tables and figures, theirs beside ours: .bench/papers.json (ARGS=--only stannis)
	@PYTHONPATH=tests .venv/bin/python -m bench.papers $(ARGS)

flower: $(FLOWER_STAMP)  ## the environment of Flower, .flower, for `millpond federate`

conformance: $(STAMP) system  ## POSIX tests and power cuts of the volume: .bench/conformance.json (PJDFSTEST=DIR FSX=DIR)
	@PYTHONPATH=tests .venv/bin/python -m conformance $(if $(PJDFSTEST),--pjdfstest "$(PJDFSTEST)") \
	  $(if $(FSX),--fsx "$(FSX)") $(if $(FSSTRESS),--fsstress "$(FSSTRESS)") $(ARGS)

manual: $(STAMP)  ## man pages, and completion for bash, zsh and fish, in dist/share
	@.venv/bin/python images/packages/manual.py dist/share

wheels: $(RELEASE_STAMP)  ## the source distribution, and wheels for x86-64 and aarch64, in dist
	@images/prerequisites.sh wheels
	@images/packages/wheels.sh

deb: wheels  ## packages for this machine's Debian release, in dist
	@images/prerequisites.sh deb
	@images/packages/deb.sh

test-wheel:  ## the wheel in dist, in fresh systems of other releases (RELEASES="bookworm noble")
	@images/prerequisites.sh chroot
	@for release in $(RELEASES); do images/packages/chroot.sh "$$release" /packages/try-wheel.sh || exit; done

test-deb:  ## the packages in dist: install, upgrade, train, remove and purge in a fresh Debian 12
	@images/prerequisites.sh chroot
	@images/packages/chroot.sh bookworm /packages/test-deb.sh

release: $(RELEASE_STAMP)  ## all that a release has, in dist, with its checksums; says how to tag it
	@images/packages/release.sh check
	@$(MAKE) --no-print-directory deb
	@images/packages/release.sh finish

system: $(STAMP)
	@images/prerequisites.sh sshd
	@.venv/bin/python -m millpond.host.remote.doctor

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard */millpond/*/*.[ch] */millpond/*/*/*.c */millpond/*/*/*/*.[ch]) $(OTHER_PYTHON)
	@images/prerequisites.sh python "$(PYTHON)"
	@images/prerequisites.sh venv "$(PYTHON)" .venv "$(ASKED_FOR)"
	@images/prerequisites.sh fuse .venv/bin/python
	@echo "millpond: installing into .venv; torch is large, so the first time takes some minutes"
	@.venv/bin/python -I $(PIP_INSTALL) -e '.[agent,demo,dev]'
	@touch $@

$(COVERAGE_STAMP): $(STAMP)
	@.venv/bin/python -I $(PIP_INSTALL) -e '.[coverage]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@.venv/bin/python -I $(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(RELEASE_STAMP): $(STAMP)
	@.venv/bin/python -I $(PIP_INSTALL) -e '.[release]'
	@touch $@

# Apart from .venv: flwr wants older versions of typer, protobuf and others than constraints.txt has.
$(FLOWER_STAMP): $(FLOWER_PINS) $(STAMP)
	@.venv/bin/python -m venv --clear .flower
	@.flower/bin/python -I -m pip install --quiet --disable-pip-version-check -r $(FLOWER_PINS)
	@.flower/bin/python -I -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

install:  ## the daemons for good, as systemd services: sudo make install
	@images/prerequisites.sh python "$(PYTHON)"
	@PYTHON="$(PYTHON)" ASKED_FOR="$(ASKED_FOR)" PREFIX="$(PREFIX)" BINDIR="$(BINDIR)" SBINDIR="$(SBINDIR)" \
	  UNITDIR="$(UNITDIR)" CONFDIR="$(CONFDIR)" SHAREDIR="$(SHAREDIR)" EXTRAS="$(EXTRAS)" PIP_INSTALL="$(PIP_INSTALL)" images/install.sh $(COMMANDS) $(UNITS)

uninstall:  ## removes what `make install` wrote; keeps /var/lib/millpond
	@test ! -e "$(PREFIX)" || test -e "$(PREFIX)/.millpond-installed" || \
	  { echo "millpond: $(PREFIX) is not millpond's: nothing removed" >&2; exit 1; }
	@images/prerequisites.sh stop "$(UNITDIR)"
	@for unit in $(UNITS); do rm -f "$(UNITDIR)/$$(basename "$$unit")"; done
	@for command in $(COMMANDS); do \
	  case $$command in mount.*) link="$(SBINDIR)/$$command" ;; *) link="$(BINDIR)/$$command" ;; esac; \
	  test "$$(readlink "$$link")" != "$(PREFIX)/bin/$$command" || rm -f "$$link"; done
	@test ! -e "$(PREFIX)/.manual" || xargs -d '\n' rm -f <"$(PREFIX)/.manual"
	@rmdir "$(CONFDIR)" 2>/dev/null || test ! -d "$(CONFDIR)" || echo "millpond: kept $(CONFDIR), it was changed"
	@rm -rf "$(PREFIX)"
	@images/prerequisites.sh reload "$(UNITDIR)"
	@echo "millpond is removed; its fleet and data stay in /var/lib/millpond, and the group millpond"

clean:  ## removes what the other targets made in this folder
	rm -rf .venv .flower .demo .bench .guest .image .site .coverage-data .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .chroot dist build
	find agent fs host images tests tunnel -name __pycache__ -prune -exec rm -rf {} +
