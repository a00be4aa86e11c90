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
{{- if and .gateway.enabled (hasKey .aggregator "backend") (ne (default "gateway" .aggregator.backend.kind) "gateway") -}}
{{- fail "aggregator.backend.kind: with gateway.enabled the aggregator asks the gateway; name the model in gateway.backend" -}}
{{- end -}}
{{- if and .gateway.enabled .aggregator.apiKeySecret -}}
{{- fail "aggregator.apiKeySecret: with gateway.enabled the key is the gateway's alone; name it in gateway.apiKeySecret" -}}
{{- end -}}
{{- if and .vllm.enabled (not .gateway.enabled) -}}
{{- fail "vllm.enabled: only the gateway reaches vLLM; set gateway.enabled too" -}}
{{- end -}}
{{- if and .vllm.enabled (not .vllm.model) -}}
{{- fail "vllm.model: which model is served? Such as Qwen/Qwen2.5-0.5B-Instruct" -}}
{{- end -}}
{{- if and .vllm.enabled .gateway.apiKeySecret -}}
{{- fail "gateway.apiKeySecret: with vllm.enabled the key is vllm.apiKeySecret" -}}
{{- end -}}
{{- if and .vllm.enabled (ne (default "vllm" .gateway.backend.kind) "vllm") -}}
{{- fail "gateway.backend.kind: with vllm.enabled the gateway asks vLLM" -}}
{{- end -}}
{{- if and .gateway.budget (not .gateway.persistence.enabled) -}}
{{- fail "gateway.budget: what was spent must outlive a restart; set gateway.persistence.enabled" -}}
{{- end -}}
{{- if and .gateway.persistence.enabled (or (gt (int .gateway.replicas) 1) .gateway.autoscaling.enabled) -}}
{{- fail "gateway.replicas: the ledger is a file of one gateway; have one replica, or no persistence" -}}
{{- end -}}
{{- if and .vllm.enabled (gt (int .vllm.replicas) 1) (has "ReadWriteOnce" .vllm.cache.accessModes) -}}
{{- fail "vllm.cache.accessModes: several replicas share the cache; it must be ReadWriteMany or ReadOnlyMany" -}}
{{- end -}}
{{- range $component, $backend := dict "aggregator" .aggregator.backend "gateway" .gateway.backend -}}
{{- range $name := list "cache" "record" -}}
{{- if not (hasPrefix "/" (default "/" (default dict $backend | dig $name "/"))) -}}
{{- fail (printf "%s.backend.%s: must begin with /, such as /var/lib/fedone/answers.db; the config's folder cannot be written" $component $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .ingress.enabled (not .ingress.hosts) -}}
{{- fail "ingress.hosts: needs at least one, such as fedone.example" -}}
{{- end -}}
{{- if and .ingress.certManager.clusterIssuer .ingress.certManager.issuer -}}
{{- fail "ingress.certManager: name a clusterIssuer or an issuer, not both" -}}
{{- end -}}
{{- if and (not .monitoring.metrics) (or .monitoring.serviceMonitor.enabled .monitoring.prometheusRule.enabled) -}}
{{- fail "monitoring.metrics: serviceMonitor and prometheusRule need it" -}}
{{- end -}}
{{- end -}}
{{- end -}}
