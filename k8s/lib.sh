# Sourced by k8s/up and k8s/down: the cluster.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
. docker/input.sh
export NAMESPACE=syncstack RUN=.run/k8s

# The cluster of kubectl's current context; without one, the only cluster of kind.
find_cluster() {
    local clusters problem
    command -v kubectl >/dev/null || refuse "kubectl is not installed. Next: https://kubernetes.io/docs/tasks/tools"
    if ! kubectl config current-context >/dev/null 2>&1; then
        clusters=$(kind get clusters 2>/dev/null || true)
        [[ -n $clusters && $clusters != *$'\n'* ]] \
            || refuse "kubectl has no current context, and kind not one cluster (observed: ${clusters:-none}). Next: kubectl config use-context NAME, or kind create cluster"
        kubectl config use-context "kind-$clusters" >/dev/null 2>&1 || kind export kubeconfig --name "$clusters" >/dev/null
    fi
    problem=$(kubectl --request-timeout=20s get nodes --output name 2>&1) \
        || refuse "the cluster does not answer: $(tail -n 1 <<<"$problem"). Next: kubectl get nodes"
}
