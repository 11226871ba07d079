{{- /*
syncstack.documents: the objects of one of k8s/'s files, as this release wants them.
Takes a dict: file, root (the chart's context), namespace, instance.
*/ -}}
{{- define "syncstack.documents" -}}
{{- $call := . -}}
{{- $text := .root.Files.Get (printf "files/%s" .file) -}}
{{- if not $text -}}{{- fail (printf "the chart lacks files/%s: it was packed without following its links" .file) -}}{{- end -}}
{{- range $document := splitList "\n---\n" $text -}}
{{- $object := fromYaml $document -}}
{{- with $object.Error -}}{{- fail . -}}{{- end -}}
{{- if ne $object.kind "Namespace" -}}{{- $_ := set $object.metadata "namespace" $call.namespace -}}{{- end -}}
{{- with $call.instance -}}
{{- $labels := dict "app.kubernetes.io/part-of" "syncstack" "app.kubernetes.io/instance" . -}}
{{- $_ := set $object.metadata "labels" (merge (deepCopy $labels) ($object.metadata.labels | default dict)) -}}
{{- if dig "spec" "template" "" $object -}}
{{- $meta := $object.spec.template.metadata -}}
{{- $_ := set $meta "labels" (merge (deepCopy $labels) ($meta.labels | default dict)) -}}
{{- end -}}
{{- end -}}
{{- if dig "spec" "template" "" $object }}{{ include "syncstack.workload" (dict "object" $object "root" $call.root) }}{{ end }}
{{- /* A Job's pods cannot be changed: a changed one is another Job, which trains anew. */ -}}
{{- if eq $object.kind "Job" -}}
{{- $_ := set $object.metadata "name" (printf "%s-%s" $object.metadata.name (toYaml $object.spec | sha256sum | trunc 8)) -}}
{{- end }}
---
{{ toYaml $object }}
{{ end -}}
{{- end -}}

{{- /* syncstack.workload: images, profile, model, steps and engines of a Job, StatefulSet or DaemonSet; in place. */ -}}
{{- define "syncstack.workload" -}}
{{- $values := .root.Values -}}
{{- $pod := .object.spec.template.spec -}}
{{- if eq .object.kind "DaemonSet" -}}
{{- include "syncstack.checksum" (dict "object" .object "text" (include "syncstack.profiles" .root)) -}}
{{- else -}}
{{- include "syncstack.checksum" (dict "object" .object "text" (print (include "syncstack.settings" .root) (include "syncstack.profiles" .root))) -}}
{{- if ne $values.seccomp "RuntimeDefault" -}}
{{- $patch := fromYamlArray (.root.Files.Get "files/seccomp-installed/wait.yaml") -}}
{{- $wait := (index $patch 0).value -}}
{{- $_ := set $wait "args" (append $wait.args (printf "/profiles/%s.json" $values.seccomp)) -}}
{{- $_ := set $pod "initContainers" (prepend $pod.initContainers $wait) -}}
{{- $_ := set $pod "volumes" (append $pod.volumes (index $patch 1).value) -}}
{{- $_ := set $pod.securityContext "seccompProfile" (dict "type" "Localhost" "localhostProfile" (printf "syncstack/%s.json" $values.seccomp)) -}}
{{- end -}}
{{- with $values.model.claim -}}
{{- $_ := set $pod "volumes" (prepend (rest $pod.volumes) (dict "name" "models" "persistentVolumeClaim" (dict "claimName" . "readOnly" true))) -}}
{{- end -}}
{{- end -}}
{{- if eq .object.kind "StatefulSet" -}}{{- $_ := set .object.spec "replicas" (int $values.engines) -}}{{- end -}}
{{- range concat ($pod.initContainers | default list) $pod.containers -}}
{{- $image := ternary $values.images.engine $values.images.trainer (hasPrefix "syncstack/engine" .image) -}}
{{- $_ := set . "image" $image -}}
{{- if eq .name "trainer" -}}{{- include "syncstack.trainer" (dict "container" . "values" $values) -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* syncstack.trainer: the arguments that depend on choices; in place. */ -}}
{{- define "syncstack.trainer" -}}
{{- $args := list -}}
{{- range .container.args -}}{{- if not (hasPrefix "--engine=tcp:" . | or (hasPrefix "--engine-url=http://engine-" .)) -}}{{- $args = append $args . -}}{{- end -}}{{- end -}}
{{- if eq .values.layout "disagg" -}}
{{- range $index := until (int .values.engines) -}}
{{- $args = append $args (printf "--engine=tcp://engine-%d.engines:7000" $index) -}}
{{- $args = append $args (printf "--engine-url=http://engine-%d.engines:8000" $index) -}}
{{- end -}}
{{- end -}}
{{- if .values.steps -}}{{- $args = append $args (printf "--steps=%d" (int .values.steps)) -}}{{- end -}}
{{- $_ := set .container "args" $args -}}
{{- end -}}

{{- /* syncstack.checksum: pods are replaced when what they mount or read changes. */ -}}
{{- define "syncstack.checksum" -}}
{{- $meta := .object.spec.template.metadata -}}
{{- $_ := set $meta "annotations" (merge (dict "checksum/config" (sha256sum .text)) ($meta.annotations | default dict)) -}}
{{- end -}}

{{- /* syncstack.settings: k8s/base/common/settings.env with this release's choices, as a ConfigMap's data. */ -}}
{{- define "syncstack.settings" -}}
{{- $data := dict -}}
{{- range splitList "\n" (.Files.Get "files/base/common/settings.env") -}}
{{- if contains "=" . | and (not (hasPrefix "#" .)) -}}
{{- $pair := splitn "=" 2 . -}}
{{- $_ := set $data $pair._0 $pair._1 -}}
{{- end -}}
{{- end -}}
{{- $_ := set $data "SYNCSTACK_PROFILE" .Values.seccomp -}}
{{- $_ := set $data "SYNCSTACK_MODEL" .Values.model.path -}}
{{- $_ := set $data "OWN_MODEL" (ternary .Values.model.path "" (ne .Values.model.claim "")) -}}
{{- toYaml $data -}}
{{- end -}}

{{- /* syncstack.profiles: the profiles, as a ConfigMap's data. */ -}}
{{- define "syncstack.profiles" -}}
{{- $data := dict -}}
{{- range list "permissive.json" "restrictive.json" -}}
{{- $_ := set $data . ($.Files.Get (printf "files/seccomp/%s" .)) -}}
{{- end -}}
{{- toYaml $data -}}
{{- end -}}
