{{- /* Parts that the pods of the chart share. */}}

{{- /* "pdcluster.podMetadata" (list . "operator") */}}
{{- define "pdcluster.podMetadata" -}}
{{- $root := index . 0 }}
{{- $values := index $root.Values (index . 1) -}}
labels:
  {{- include "pdcluster.labels" . | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* "pdcluster.podSettings" (list . "operator"): security and scheduling. */}}
{{- define "pdcluster.podSettings" -}}
{{- $root := index . 0 }}
{{- $values := index $root.Values (index . 1) -}}
enableServiceLinks: false
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $field := list "priorityClassName" "nodeSelector" "tolerations" }}
{{- with index $values $field }}
{{ $field }}: {{- if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* "pdcluster.container" (list . "operator"): what is the same in all containers. */}}
{{- define "pdcluster.container" -}}
{{- $root := index . 0 -}}
image: {{ include "pdcluster.image" $root }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml $root.Values.securityContext | nindent 2 }}
{{- with (index $root.Values (index . 1)).resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}

{{- define "pdcluster.loggingArgs" -}}
- --log-level={{ .Values.logging.level }}
- --log-format={{ .Values.logging.format }}
{{- end }}
