# The virtual environment that scripts/test and scripts/demo run in. Sourced from the repository's
# root; asks for nothing but Python 3.10 or newer (PYTHON=... chooses which). What the compiled
# image kernel needs is fetched where that takes no password; PENSTOCK_NO_KERNEL=1 does without.

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

# run WHAT COMMAND...: says what happens, and ends everything where it fails.
run() {
    local what=$1 code=0
    shift
    printf '==> %s\n' "$what"
    "$@" || code=$?
    if ((code)); then
        printf '==> FAILED: %s (exit code %d)\n' "$what" "$code" >&2
        exit "$code"
    fi
}

fail() {
    printf '==> FAILED: %s\n' "$*" >&2
    exit 1
}

# Twice quiet: warnings about a machine's pip settings are not about this project.
environment=.venv
pip_install() {
    "$environment/bin/python" -m pip install --quiet --quiet --constraint constraints.txt "$@"
}

# Sets python.
choose_python() {
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$python is missing or older than 3.10; name another with PYTHON=python3.12 $0"
}

kernel_switched_off() {
    [[ ${PENSTOCK_NO_KERNEL:-0} != 0 ]]
}

# compiles: whether the C program on the standard input does. CC may be several words.
compiles() {
    ${CC:-cc} ${CPPFLAGS:-} ${CFLAGS:-} -fsyntax-only -x c - 2>/dev/null
}

# kernel_lacks: what is missing to compile the kernel for $python, in words of package_names.
kernel_lacks() {
    local include
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    compiles <<<'#include <stdio.h>' || echo compiler
    # The libjpeg that is not turbo cannot begin within a picture.
    compiles <<<'#include <stdio.h>
        #include <jpeglib.h>
        int version[] = {LIBJPEG_TURBO_VERSION_NUMBER};' || echo libjpeg
    [[ -e $include/Python.h ]] || echo python
}

package_manager() {
    local manager
    for manager in apt-get dnf microdnf yum apk zypper pacman; do
        if command -v "$manager" >/dev/null; then
            echo "$manager"
            return
        fi
    done
}

# package_names MANAGER LACKS...: what the packages with these are called.
package_names() {
    local manager=$1 lacks
    shift
    for lacks in "$@"; do
        case $lacks:$manager in
            compiler:apt-get) echo gcc libc6-dev ;;
            compiler:apk) echo gcc musl-dev ;;
            compiler:*) echo gcc ;;
            # Debian and Ubuntu have different names for the turbo that this one stands for.
            libjpeg:apt-get) echo libjpeg-dev ;;
            libjpeg:apk) echo libjpeg-turbo-dev ;;
            libjpeg:pacman) echo libjpeg-turbo ;;
            libjpeg:zypper) echo libjpeg8-devel ;;
            libjpeg:*) echo libjpeg-turbo-devel ;;
            python:apt-get)
                "$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])'
                ;;
            python:apk) echo python3-dev ;;
            python:pacman) echo python ;;
            python:*) python_devel ;;
        esac
    done
}

# Where packages are RPMs, the headers' is called after the one that brought $python: python3,
# python3.11 or python311-base, as the distribution has it.
python_devel() {
    local program owner
    program=$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
    owner=$(rpm --query --file --queryformat '%{NAME}' "$program" 2>/dev/null) || owner=python3
    echo "${owner%-base}-devel"
}

as_root() {
    if [[ $(id -u) == 0 ]]; then
        "$@"
    else
        sudo -n "$@"
    fi
}

# install_packages MANAGER NAME...
install_packages() {
    local manager=$1
    shift
    case $manager in
        apt-get)
            set -- apt-get install --yes --no-install-recommends "$@"
            set -- env DEBIAN_FRONTEND=noninteractive "$@"
            # The second time with a new list: the old one may be empty, or name what is gone.
            as_root "$@" || { as_root apt-get update && as_root "$@"; }
            ;;
        apk) as_root apk add --no-cache "$@" ;;
        zypper) as_root zypper --non-interactive install --no-recommends "$@" ;;
        pacman) as_root pacman --sync --noconfirm --needed "$@" ;;
        *) as_root "$manager" install -y "$@" ;;
    esac
}

# equip_kernel: fetches what the kernel lacks, if it may. Never asks; where it cannot, it fails, and
# $by_hand says what to do.
equip_kernel() {
    local lacks manager names
    lacks=$(kernel_lacks)
    if [[ ! $lacks ]]; then return; fi
    manager=$(package_manager)
    if [[ ! $manager ]]; then
        by_hand="install a C compiler, and the headers of libjpeg-turbo and Python"
        return 1
    fi
    # shellcheck disable=SC2086 # words
    names=$(package_names "$manager" $lacks | paste -sd ' ')
    by_hand="install as root: $names"
    if as_root true </dev/null >/dev/null 2>&1; then
        printf '==> for the compiled image kernel: %s installs %s\n' "$manager" "$names"
        # shellcheck disable=SC2086 # words
        install_packages "$manager" $names </dev/null >/dev/null 2>&1 || true
        lacks=$(kernel_lacks)
    fi
    [[ ! $lacks ]]
}

# equip_browser: fetches Chromium, which pages are tested in, if it may. Where it cannot, those tests
# are skipped.
equip_browser() {
    local manager
    if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then return; fi
    manager=$(package_manager)
    if [[ $manager ]] && as_root true </dev/null >/dev/null 2>&1; then
        printf '==> for tests of pages: %s installs chromium\n' "$manager"
        install_packages "$manager" chromium </dev/null >/dev/null 2>&1 || true
    fi
}

# requirements: all that an installation depends on. That the kernel could not be compiled is part
# of it: once it can, it will be.
requirements() {
    sha256sum pyproject.toml constraints.txt scripts/environment.sh hatch_build.py \
        native/*.[ch] native/*/*.[ch]
    if kernel_switched_off; then
        echo "without the kernel"
    else
        echo "the kernel lacks:" $(kernel_lacks)
    fi
}

# prepare LEVEL: "demo" is the library with PyTorch, "dev" adds what checks and tests need. What
# was installed is stamped, so that the next run installs only what the requirements changed.
prepare() {
    local level=$1 place wanted
    choose_python

    # Paths inside an environment are absolute: a copied or renamed repository needs its own.
    place="$PWD, Python $("$python" -c 'import sys; print(sys.version)' | tr '\n' ' ')"
    if [[ $(cat .venv/place 2>/dev/null) != "$place" ]]; then
        run "environment in .venv" "$python" -m venv --clear .venv
        printf '%s\n' "$place" >.venv/place
    fi

    wanted=$(requirements)
    if [[ $(cat ".venv/installed-$level" 2>/dev/null) != "$wanted" ]]; then
        if ! kernel_switched_off && ! equip_kernel; then
            printf '==> the image kernel is left out: the pure path serves. To have it, %s\n' \
                "$by_hand"
        fi
        wanted=$(requirements)
        # First and by itself, so that nothing else decides which torch it is.
        run "PyTorch" pip_install torch
        run "build tools" pip_install hatchling editables
        if [[ $level == demo ]]; then
            run "Penstock" pip_install --no-build-isolation --editable '.[image]'
        else
            run "Penstock and its tools" pip_install --no-build-isolation --editable '.[dev]'
            # Tests compare with its transforms, which are Python: that its compiled operators may
            # not fit this build of torch does not matter (tests put stand-ins for the two that
            # its import asks for), and that it would bring another torch does.
            run "torchvision" pip_install --no-deps torchvision
            run "other libraries for tests" pip_install absl-py albumentations datasets \
                prometheus_client protobuf
            # By themselves: they would bring another torch, and need nothing else that is missing.
            run "trainers for tests" pip_install --no-deps accelerate lightning \
                lightning-utilities pytorch-lightning safetensors tensorboard torchmetrics
        fi
        # What serves development serves the demo too.
        printf '%s\n' "$wanted" | tee .venv/installed-demo ".venv/installed-$level" >/dev/null
    fi
    export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
    unset PYTHONHOME
}
