# Sourced by docker/lib.sh and k8s/lib.sh: what a user gave, the one way to refuse it, and a secret that nobody gave.
# shellcheck shell=bash

# refuse TEXT: bad input; one line, exit 2. Nothing has been started when it is called.
refuse() {
    echo "error: $1" >&2
    exit 2
}

# positive NAME VALUE: a whole number above 0
positive() {
    [[ $2 =~ ^[1-9][0-9]{0,8}$ ]] || refuse "$1 is not a positive number (observed: $2)"
}

# A new secret for one stack, without a line's end.
new_token() {
    head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'
}
