{{/* Errors for combinations of values that values.schema.json does not refuse with a clear message. */}}
{{- define "fedone.checks" -}}
{{- with .Values -}}
{{- $replicated := or (gt (int .aggregator.replicas) 1) .aggregator.autoscaling.enabled -}}
{{- if and (eq .store.kind "sqlite") $replicated -}}
{{- fail "aggregator.replicas: SQLite supports only one replica; for more replicas, or autoscaling, set store.kind to postgresql" -}}
{{- end -}}
{{- if and .postgresql.enabled (eq .store.kind "sqlite") -}}
{{- fail "postgresql.enabled: with store.kind sqlite it would not be used; set store.kind to postgresql" -}}
{{- end -}}
{{- if and (eq .store.kind "postgresql") (not .postgresql.enabled) (not .store.postgresql.host) -}}
{{- fail "store.postgresql.host: set the host of your database, or set postgresql.enabled" -}}
{{- end -}}
{{- if and .postgresql.enabled .store.postgresql.host -}}
{{- fail "store.postgresql.host: with postgresql.enabled there would be two databases; set only one of these" -}}
{{- end -}}
{{- if not (or .aggregator.enrolmentTokens .aggregator.adminTokens) -}}
{{- fail "aggregator.enrolmentTokens: needs at least one token, or no device can enrol; or set aggregator.adminTokens, and create a token later" -}}
{{- end -}}
{{- if and .vllm.enabled (not (hasKey .aggregator "backend")) -}}
{{- fail "vllm.enabled: only the aggregator can use vLLM, so aggregator.backend must not be null" -}}
{{- end -}}
{{- if and .vllm.enabled (not .vllm.model) -}}
{{- fail "vllm.model: name the model to serve, such as Qwen/Qwen2.5-0.5B-Instruct" -}}
{{- end -}}
{{- if and .vllm.enabled .aggregator.apiKeySecret -}}
{{- fail "aggregator.apiKeySecret: with vllm.enabled set vllm.apiKeySecret instead" -}}
{{- end -}}
{{- if and .vllm.enabled (ne (default "vllm" .aggregator.backend.kind) "vllm") -}}
{{- fail "aggregator.backend.kind: must be vllm with vllm.enabled" -}}
{{- end -}}
{{- if and .vllm.enabled (gt (int .vllm.replicas) 1) (has "ReadWriteOnce" .vllm.cache.accessModes) -}}
{{- fail "vllm.cache.accessModes: several replicas share the cache, so it must be ReadWriteMany or ReadOnlyMany" -}}
{{- end -}}
{{- $own := default dict .aggregator.backend -}}
{{- if and (eq "openai" (default "" $own.kind)) (not $own.base_url) (not .aggregator.apiKeySecret) (not .aggregator.extraEnv) -}}
{{- fail "aggregator.apiKeySecret: OpenAI needs an API key; name its Secret, such as {name: fedone, key: openai-key}" -}}
{{- end -}}
{{- range $name := list "cache" "record" -}}
{{- if not (hasPrefix "/" (default "/" (default dict $.Values.aggregator.backend | dig $name "/"))) -}}
{{- fail (printf "aggregator.backend.%s: must begin with /, such as /var/lib/fedone/answers.db; the folder of the config is read-only" $name) -}}
{{- end -}}
{{- end -}}
{{- if and .httpRoute.enabled (not .httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: needs the gateway, such as [{name: gateway, namespace: infra}]" -}}
{{- end -}}
{{- if and .aggregator.tls.clientCertificates (not .aggregator.tls.secretName) -}}
{{- fail "aggregator.tls.clientCertificates: needs aggregator.tls.secretName, a Secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and .ingress.enabled (not .ingress.hosts) -}}
{{- fail "ingress.hosts: needs at least one, such as fedone.example" -}}
{{- end -}}
{{- if and .ingress.certManager.clusterIssuer .ingress.certManager.issuer -}}
{{- fail "ingress.certManager: name a clusterIssuer or an issuer, not both" -}}
{{- end -}}
{{- if and (not .monitoring.metrics) .aggregator.autoscaling.enabled .aggregator.autoscaling.targetRequestsInProgress -}}
{{- fail "aggregator.autoscaling.targetRequestsInProgress: needs monitoring.metrics; or set it to 0, to use only the CPU" -}}
{{- end -}}
{{- if and (not .monitoring.metrics) (or .monitoring.serviceMonitor.enabled .monitoring.prometheusRule.enabled) -}}
{{- fail "monitoring.metrics: must be true for serviceMonitor and prometheusRule" -}}
{{- end -}}
{{- end -}}
{{- end -}}
