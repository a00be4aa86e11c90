{{/* What values.schema.json cannot say in words: one clear line for values that do not go together. */}}
{{- define "fedone.checks" -}}
{{- with .Values -}}
{{- $replicated := or (gt (int .aggregator.replicas) 1) .aggregator.autoscaling.enabled -}}
{{- if and (eq .store.kind "sqlite") $replicated -}}
{{- fail "aggregator.replicas: SQLite is for one process; set store.kind to postgresql for more, or for autoscaling" -}}
{{- end -}}
{{- if and .postgresql.enabled (eq .store.kind "sqlite") -}}
{{- fail "postgresql.enabled: nothing would use it; set store.kind to postgresql" -}}
{{- end -}}
{{- if and (eq .store.kind "postgresql") (not .postgresql.enabled) (not .store.postgresql.host) -}}
{{- fail "store.postgresql.host: name a database of yours, or set postgresql.enabled" -}}
{{- end -}}
{{- if and .postgresql.enabled .store.postgresql.host -}}
{{- fail "store.postgresql.host: there are two databases; leave it out, or postgresql.enabled" -}}
{{- end -}}
{{- if not (or .aggregator.enrolmentTokens .aggregator.adminTokens) -}}
{{- fail "aggregator.enrolmentTokens: needs at least one, or no device can enrol; or name an admin in aggregator.adminTokens" -}}
{{- end -}}
{{- if and .vllm.enabled (not (hasKey .aggregator "backend")) -}}
{{- fail "vllm.enabled: only the aggregator reaches vLLM; leave aggregator.backend as it is" -}}
{{- end -}}
{{- if and .vllm.enabled (not .vllm.model) -}}
{{- fail "vllm.model: which model is served? Such as Qwen/Qwen2.5-0.5B-Instruct" -}}
{{- end -}}
{{- if and .vllm.enabled .aggregator.apiKeySecret -}}
{{- fail "aggregator.apiKeySecret: with vllm.enabled the key is vllm.apiKeySecret" -}}
{{- end -}}
{{- if and .vllm.enabled (ne (default "vllm" .aggregator.backend.kind) "vllm") -}}
{{- fail "aggregator.backend.kind: with vllm.enabled the aggregator asks vLLM" -}}
{{- end -}}
{{- if and .vllm.enabled (gt (int .vllm.replicas) 1) (has "ReadWriteOnce" .vllm.cache.accessModes) -}}
{{- fail "vllm.cache.accessModes: several replicas share the cache; it must be ReadWriteMany or ReadOnlyMany" -}}
{{- end -}}
{{- $own := default dict .aggregator.backend -}}
{{- if and (eq "openai" (default "" $own.kind)) (not $own.base_url) (not .aggregator.apiKeySecret) (not .aggregator.extraEnv) -}}
{{- fail "aggregator.apiKeySecret: OpenAI asks for a key; name its Secret, as {name: fedone, key: openai-key}" -}}
{{- end -}}
{{- range $name := list "cache" "record" -}}
{{- if not (hasPrefix "/" (default "/" (default dict $.Values.aggregator.backend | dig $name "/"))) -}}
{{- fail (printf "aggregator.backend.%s: must begin with /, such as /var/lib/fedone/answers.db; the config's folder cannot be written" $name) -}}
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
{{- fail "aggregator.autoscaling.targetRequestsInProgress: needs monitoring.metrics; or set it to 0, for the CPU alone" -}}
{{- end -}}
{{- if and (not .monitoring.metrics) (or .monitoring.serviceMonitor.enabled .monitoring.prometheusRule.enabled) -}}
{{- fail "monitoring.metrics: serviceMonitor and prometheusRule need it" -}}
{{- end -}}
{{- end -}}
{{- end -}}
