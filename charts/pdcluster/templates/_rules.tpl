{{- /* What the operator may do in a namespace that it watches. */}}
{{- define "pdcluster.watchedRules" -}}
- apiGroups: [pdcluster.dev]
  resources: [pdclusters]
  verbs: [get, list, watch]
- apiGroups: [pdcluster.dev]
  resources: [pdclusters/status]
  verbs: [get, update, patch]
# Owner references that block deletion, where the API server checks them.
- apiGroups: [pdcluster.dev]
  resources: [pdclusters/finalizers]
  verbs: [update]
# Children are written by server-side apply: a patch that may create.
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# The ticket keys of each PDCluster. Their names are not known beforehand, so that RBAC cannot limit
# them by name; Secrets are neither listed nor watched.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
# Pods are made by StatefulSets; deleting one restarts its engine.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{- /* What both processes read of the cluster itself: which namespaces and kinds exist. */}}
{{- define "pdcluster.discoveryRules" -}}
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get, list, watch]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [get, list, watch]
{{- end }}
