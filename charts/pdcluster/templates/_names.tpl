{{- /* Names and labels. A name that is too long is cut before its suffix, so that names differ. */}}

{{- define "pdcluster.fullname" -}}
{{- $base := .Values.fullnameOverride }}
{{- if not $base }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $base = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- end }}
{{- $base | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* "pdcluster.name" (list . "webhook"): at most 63 characters with the suffix. */}}
{{- define "pdcluster.name" -}}
{{- $suffix := index . 1 }}
{{- $room := sub 62 (len $suffix) | int }}
{{- printf "%s-%s" (include "pdcluster.fullname" (index . 0) | trunc $room | trimSuffix "-") $suffix }}
{{- end }}

{{- define "pdcluster.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* "pdcluster.labels" (list . "webhook"): the selector's labels, and what the object is part of. */}}
{{- define "pdcluster.labels" -}}
{{- $root := index . 0 -}}
{{ include "pdcluster.selector" $root }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/part-of: pdcluster
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* "pdcluster.account" (list . "webhook"): name of a component's ServiceAccount. */}}
{{- define "pdcluster.account" -}}
{{- $values := (index (index . 0).Values (index . 1)).serviceAccount }}
{{- $own := ternary (include "pdcluster.name" .) "default" $values.create }}
{{- default $own $values.name }}
{{- end }}

{{- define "pdcluster.image" -}}
{{- with .Values.image }}
{{- if not .repository }}
{{- fail "image.repository is empty: no public registry has the operator's image yet. Build it in a clone with `make image REPOSITORY=REGISTRY/pdcluster-operator PUSH=1`, or use one that your registry has. Then --set image.repository=REGISTRY/pdcluster-operator,image.tag=TAG" }}
{{- end }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{- define "pdcluster.certificateSecret" -}}
{{- default (include "pdcluster.name" (list . "webhook-tls")) .Values.webhook.certificate.existingSecret }}
{{- end }}

{{- /* The namespace in which admission is tried: one that it reviews, if there is one. */}}
{{- define "pdcluster.testNamespace" -}}
{{- $given := .Values.test.namespace }}
{{- $watched := .Values.watchNamespaces }}
{{- if and $given .Values.webhook.enabled }}
{{- if eq $given .Release.Namespace }}
{{- fail (printf "test.namespace is %s, the release's own namespace, which admission does not review: choose another" $given) }}
{{- else if and $watched (not (has $given $watched)) }}
{{- fail (printf "test.namespace is %s, which admission does not review: choose one of watchNamespaces (%s)" $given (join ", " $watched)) }}
{{- end }}
{{- end }}
{{- $fallback := ternary "kube-public" "default" (eq .Release.Namespace "default") }}
{{- default (first (append (without $watched .Release.Namespace) $fallback)) $given }}
{{- end }}
