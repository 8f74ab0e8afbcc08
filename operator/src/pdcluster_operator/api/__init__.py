"""The custom resources of the group pdcluster.dev: types, rules, schemas, conditions and names.

Clients of Kubernetes' API are in ``adapters/api_server``. The API server of local mode is in
``local``.
"""
