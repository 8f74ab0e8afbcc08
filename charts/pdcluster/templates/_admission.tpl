{{- /* Shared by `helm test` and the hook after an installation: both try admission. */}}

{{- /* Not empty where admission reviews PDClusters in the namespace of the test. */}}
{{- define "pdcluster.reviewed" -}}
{{- $namespace := include "pdcluster.testNamespace" . }}
{{- $watched := .Values.watchNamespaces }}
{{- if and .Values.webhook.enabled (ne $namespace .Release.Namespace) (or (not $watched) (has $namespace $watched)) }}true{{ end }}
{{- end }}

{{- /* "pdcluster.sample" (list . "good"): a PDCluster of the class that this release judges. */}}
{{- define "pdcluster.sample" -}}
{{- $root := index . 0 }}
{{- $text := $root.Files.Get (printf "files/samples/%s.json" (index . 1)) }}
{{- with $root.Values.operator.class }}
{{- $sample := fromJson $text }}
{{- $_ := set $sample.spec "operatorClass" . }}
{{- $text = toPrettyJson $sample }}
{{- end }}
{{- $text }}
{{- end }}

{{- /* "pdcluster.hook" (list "test" "0"): annotations of a hook. The weight orders hooks of one event. */}}
{{- define "pdcluster.hook" -}}
helm.sh/hook: {{ index . 0 }}
helm.sh/hook-weight: {{ index . 1 | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- /* "pdcluster.admissionAccess" (list . "test" "test"): component and events. Renders the files of
the check, and an account whose only right is to create a PDCluster in the namespace of the test. */}}
{{- define "pdcluster.admissionAccess" -}}
{{- $root := index . 0 }}
{{- $name := include "pdcluster.name" . }}
{{- $labels := include "pdcluster.labels" . }}
{{- $hook := include "pdcluster.hook" (list (index . 2) "-1") }}
{{- $namespace := include "pdcluster.testNamespace" $root -}}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- $labels | nindent 4 }}
  annotations:
    {{- $hook | nindent 4 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ $namespace }}
  labels:
    {{- $labels | nindent 4 }}
  annotations:
    {{- $hook | nindent 4 }}
rules:
  - apiGroups: [pdcluster.dev]
    resources: [pdclusters]
    verbs: [create]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ $namespace }}
  labels:
    {{- $labels | nindent 4 }}
  annotations:
    {{- $hook | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ $name }}
    namespace: {{ $root.Release.Namespace }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- $labels | nindent 4 }}
  annotations:
    {{- $hook | nindent 4 }}
data:
  admission_check.py: |
    {{- $root.Files.Get "files/admission_check.py" | nindent 4 }}
  good.json: |
    {{- include "pdcluster.sample" (list $root "good") | nindent 4 }}
  # If the webhook reviews nothing here, only the CRD's own schema and rules refuse a PDCluster.
  bad.json: |
    {{- include "pdcluster.sample" (list $root (ternary "bad" "malformed" (eq "true" (include "pdcluster.reviewed" $root)))) | nindent 4 }}
{{- end }}

{{- /* "pdcluster.admissionPod" (list . "startup-check" "wait" 120): component, mode of the program,
and further arguments. The pod has the settings of the webhook's pods. */}}
{{- define "pdcluster.admissionPod" -}}
{{- $root := index . 0 }}
{{- $name := include "pdcluster.name" . -}}
restartPolicy: Never
serviceAccountName: {{ $name }}
{{ include "pdcluster.podSettings" (list $root "webhook") }}
containers:
  - name: {{ index . 1 }}
    {{- include "pdcluster.container" (list $root "webhook") | nindent 4 }}
    command: [python3, /check/admission_check.py]
    args:
      - {{ index . 2 }}
      - {{ include "pdcluster.testNamespace" $root }}
      - {{ ternary "PrefixCachingHeterogeneousBlocks" "spec.model.source" (eq "true" (include "pdcluster.reviewed" $root)) }}
      {{- range slice . 3 }}
      - {{ . | quote }}
      {{- end }}
    volumeMounts:
      - {name: check, mountPath: /check, readOnly: true}
volumes:
  - name: check
    configMap:
      name: {{ $name }}
{{- end }}
