# Makes the virtual environment of scripts/setup, scripts/test and scripts/demo. Sourced from the
# root of the repository; needs only Python 3.10 or newer (PYTHON=... chooses which). Installs the
# packages that the compiled image kernel needs, if that needs no password; PENSTOCK_NO_KERNEL=1
# leaves the kernel out.

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

# run TITLE COMMAND...: prints the title and runs the command; exits if the command fails.
run() {
    local title=$1 code=0
    shift
    printf '==> %s\n' "$title"
    "$@" || code=$?
    if ((code)); then
        printf '==> FAILED: %s (exit code %d)\n' "$title" "$code" >&2
        exit "$code"
    fi
}

fail() {
    printf '==> FAILED: %s\n' "$*" >&2
    exit 1
}

# Two times --quiet: hides pip's warnings about the settings of the machine.
environment=.venv
pip_install() {
    "$environment/bin/python" -m pip install --quiet --quiet --constraint constraints.txt "$@"
}

# choose_python: sets $python; fails if it is missing or too old.
choose_python() {
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$python is missing or older than 3.10; choose another: PYTHON=python3.12 $0"
}

kernel_switched_off() {
    [[ ${PENSTOCK_NO_KERNEL:-0} != 0 ]]
}

# compiles: whether the C program on stdin compiles. CC may be several words.
compiles() {
    ${CC:-cc} ${CPPFLAGS:-} ${CFLAGS:-} -fsyntax-only -x c - 2>/dev/null
}

# missing_for_kernel: prints what is missing to compile the kernel for $python: compiler, libjpeg,
# python.
missing_for_kernel() {
    local include
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    compiles <<<'#include <stdio.h>' || echo compiler
    # The original libjpeg cannot start decoding inside an image; libjpeg-turbo can.
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

# package_names MANAGER MISSING...: prints the packages that provide what is missing.
package_names() {
    local manager=$1 missing
    shift
    for missing in "$@"; do
        case $missing:$manager in
            compiler:apt-get) echo gcc libc6-dev ;;
            compiler:apk) echo gcc musl-dev ;;
            compiler:*) echo gcc ;;
            # Debian and Ubuntu name libjpeg-turbo differently; this package selects it on both.
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

# python_devel: prints the RPM package with the headers of $python. Its name follows from that of
# the package that owns $python: python3, python3.11 or python311-base, as the distribution has it.
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
            # If it fails, again after an update: the package list may be empty or out of date.
            as_root "$@" || { as_root apt-get update && as_root "$@"; }
            ;;
        apk) as_root apk add --no-cache "$@" ;;
        zypper) as_root zypper --non-interactive install --no-recommends "$@" ;;
        pacman) as_root pacman --sync --noconfirm --needed "$@" ;;
        *) as_root "$manager" install -y "$@" ;;
    esac
}

# equip_kernel: installs the packages that the kernel needs, if that needs no password. Otherwise it
# fails, and $by_hand says what the user can do.
equip_kernel() {
    local missing manager names
    missing=$(missing_for_kernel)
    if [[ ! $missing ]]; then return; fi
    manager=$(package_manager)
    if [[ ! $manager ]]; then
        by_hand="install a C compiler, and the headers of libjpeg-turbo and Python"
        return 1
    fi
    # shellcheck disable=SC2086 # words
    names=$(package_names "$manager" $missing | paste -sd ' ')
    by_hand="install as root: $names"
    if as_root true </dev/null >/dev/null 2>&1; then
        printf '==> packages for the compiled image kernel: %s installs %s\n' "$manager" "$names"
        # shellcheck disable=SC2086 # words
        install_packages "$manager" $names </dev/null >/dev/null 2>&1 || true
        missing=$(missing_for_kernel)
    fi
    [[ ! $missing ]]
}

# equip_browser: installs Chromium for the tests of web pages, if that needs no password. Without it
# those tests are skipped.
equip_browser() {
    local manager
    if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then return; fi
    manager=$(package_manager)
    if [[ $manager ]] && as_root true </dev/null >/dev/null 2>&1; then
        printf '==> browser for the tests of web pages: %s installs chromium\n' "$manager"
        install_packages "$manager" chromium </dev/null >/dev/null 2>&1 || true
    fi
}

# equip_hosts: installs iproute2 and openssl for the tests of several machines, if that needs no
# password. Without them those tests are skipped.
equip_hosts() {
    local manager names
    if command -v ip >/dev/null && command -v tc >/dev/null && command -v openssl >/dev/null; then
        return
    fi
    manager=$(package_manager)
    case $manager in
        dnf | microdnf | yum) names="iproute iproute-tc openssl" ;;
        *) names="iproute2 openssl" ;;
    esac
    if [[ $manager ]] && as_root true </dev/null >/dev/null 2>&1; then
        printf '==> tools for the tests of several machines: %s installs %s\n' "$manager" "$names"
        # shellcheck disable=SC2086 # words
        install_packages "$manager" $names </dev/null >/dev/null 2>&1 || true
    fi
}

# requirements: prints everything that an installation depends on. This includes what is missing for
# the kernel, so that the kernel is built as soon as nothing is missing.
requirements() {
    sha256sum pyproject.toml constraints.txt scripts/environment.sh hatch_build.py \
        native/*.[ch] native/*/*.[ch]
    if kernel_switched_off; then
        echo "without the kernel"
    else
        echo "missing for the kernel:" $(missing_for_kernel)
    fi
}

# prepare LEVEL: makes or updates .venv. Level "demo" is the library with PyTorch; "dev" adds the
# tools for checks and tests. The requirements are written to a file in .venv, so that the next run
# installs only if they have changed.
prepare() {
    local level=$1 place wanted
    choose_python

    # Paths inside an environment are absolute: a copied or renamed repository needs a new one.
    place="$PWD, Python $("$python" -c 'import sys; print(sys.version)' | tr '\n' ' ')"
    if [[ $(cat .venv/place 2>/dev/null) != "$place" ]]; then
        run "environment in .venv" "$python" -m venv --clear .venv
        printf '%s\n' "$place" >.venv/place
    fi

    wanted=$(requirements)
    if [[ $(cat ".venv/installed-$level" 2>/dev/null) != "$wanted" ]]; then
        if ! kernel_switched_off && ! equip_kernel; then
            printf '==> without the image kernel: simplejpeg and OpenCV serve. To build it, %s\n' \
                "$by_hand"
        fi
        wanted=$(requirements)
        # First and separately, so that no other package decides the version of torch.
        run "PyTorch" pip_install torch
        run "build tools" pip_install hatchling editables
        if [[ $level == demo ]]; then
            run "Penstock" pip_install --no-build-isolation --editable '.[image]'
            # Without its dependencies, which would install another torch.
            run "torchvision" pip_install --no-deps pillow torchvision
        else
            # Builds of torch for CUDA bring the Triton that fits them. The others get this one, on
            # Python 3.11 and newer; without it the tests of its kernels are skipped.
            if [[ $(uname -m) == x86_64 ]] && ! "$environment/bin/python" -c '
import sys, importlib.util
sys.exit(sys.version_info >= (3, 11) and importlib.util.find_spec("triton") is None)'; then
                run "Triton" pip_install --no-deps triton==3.9.0
            fi
            run "Penstock and its tools" pip_install --no-build-isolation --editable '.[dev]'
            # Without its dependencies, which would install another torch. Tests compare with its
            # transforms, which are pure Python. Its compiled operators may not fit this build of
            # torch; tests replace the two that its import needs.
            run "torchvision" pip_install --no-deps torchvision
            run "other libraries for tests" pip_install absl-py albumentations datasets flask \
                flask-cors 'moto[s3]' prometheus_client protobuf webdataset
            # Without their dependencies, which would install another torch; all others are there.
            run "trainers for tests" pip_install --no-deps accelerate lightning \
                lightning-utilities pytorch-lightning safetensors tensorboard torchmetrics
        fi
        # The environment for development also serves the demo.
        printf '%s\n' "$wanted" | tee .venv/installed-demo ".venv/installed-$level" >/dev/null
    fi
    export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
    # With PYTHONDONTWRITEBYTECODE, each of the many processes that tests start compiles Penstock
    # again. That was more than a third of the CPU time of tests/node/test_recut.py.
    unset PYTHONHOME PYTHONDONTWRITEBYTECODE
}
