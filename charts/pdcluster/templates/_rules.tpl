{{- /* What the operator may do in a namespace that it watches. */}}
{{- define "pdcluster.watchedRules" -}}
- apiGroups: [pdcluster.dev]
  resources: [pdclusters, prefillscalers]
  verbs: [get, list, watch]
- apiGroups: [pdcluster.dev]
  resources: [pdclusters/status, prefillscalers/status]
  verbs: [get, update, patch]
# For spec.autoscaling with the mode Apply.
- apiGroups: [pdcluster.dev]
  resources: [pdclusters/scale, prefillscalers/scale]
  verbs: [patch]
# Some API servers ask for this right when an owner reference blocks deletion.
- apiGroups: [pdcluster.dev]
  resources: [pdclusters/finalizers]
  verbs: [update]
# The operator writes children by server-side apply, a patch that may also create.
- apiGroups: [apps]
  resources: [statefulsets, deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
# Whose the pods of routers are: a ReplicaSet stands between them and their Deployment.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
# A Job downloads weights with spec.model.cache.downloadedBy only.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Not every API server has PodGroups. They are used with spec.scheduling.gang only.
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
# The ticket key of each PDCluster. RBAC cannot limit this by name, because the names are not known
# beforehand. The operator neither lists nor watches Secrets.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
# StatefulSets create and delete the pods. The operator does neither, but the dry run of a new pod
# needs the right to create one.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create]
# In each namespace with PDClusters, the operator that holds a Lease works on them. RBAC cannot limit
# by name what is created.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [pdcluster-operator{{ with .Values.operator.class }}-{{ . }}{{ end }}]
  verbs: [get, update]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{- /* The webhook reads the ConfigMap of spec.model.configMapRef, whose name is not known beforehand. */}}
{{- define "pdcluster.reviewRules" -}}
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get]
{{- end }}

{{- /* Both processes read which namespaces and kinds exist in the cluster. */}}
{{- define "pdcluster.discoveryRules" -}}
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get, list, watch]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [get, list, watch]
{{- end }}
