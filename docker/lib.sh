# Sourced by docker/up and docker/down: names and the compose command line.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
. docker/input.sh
# One project per checkout, so that two of them do not collide. PROJECT= overrides.
export COMPOSE_PROJECT_NAME=${PROJECT:-syncstack-$(pwd -P | cksum | cut -d' ' -f1)}
export LAYOUT=${LAYOUT:-colocated} SECCOMP=${SECCOMP:-restrictive} PORT=${PORT:-8000}
export DOCKER_BUILDKIT=1 COMPOSE_PROFILES=${COMPOSE_PROFILES:-$LAYOUT} COMPOSE_IGNORE_ORPHANS=1
# The secret of the disagg layout; written by docker/up, removed by docker/down.
export TOKEN_FILE=$PWD/.run/$COMPOSE_PROJECT_NAME.token

# compose ARGUMENT...: docker compose with the files that SECCOMP and MODEL ask for
compose() {
    local files=(-f compose.yaml)
    case $SECCOMP in docker-default | unconfined) files+=(-f "docker/compose.$SECCOMP.yaml") ;; esac
    if [[ -n ${MODEL:-} ]]; then files+=(-f docker/compose.model.yaml); fi
    docker compose --progress "${COMPOSE_PROGRESS:-quiet}" "${files[@]}" "$@"
}

check_docker() {
    local version problem
    command -v docker >/dev/null || refuse "docker is not installed. Next: install Docker Engine with its compose plugin"
    problem=$(timeout 20 docker info --format '{{.ServerVersion}}' 2>&1 >/dev/null) \
        || refuse "the Docker engine does not answer: $(tail -n 1 <<<"$problem"). Next: start it, or run as a user who may use it"
    version=$(docker compose version --short 2>/dev/null) \
        || refuse "docker has no compose plugin (expected: 2.24.4 or newer). Next: install docker-compose-plugin"
    version=${version#v}
    [[ $(printf '%s\n' 2.24.4 "$version" | sort -V | head -n 1) == 2.24.4 ]] \
        || refuse "docker compose is too old (observed: $version; expected: 2.24.4 or newer). Next: update docker-compose-plugin"
}
