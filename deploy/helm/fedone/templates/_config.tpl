{{/* The server's CONFIG.yaml, and the environment variables with the secrets for it. */}}

{{- define "fedone.databaseHost" -}}
{{- if .Values.postgresql.enabled -}}
{{- include "fedone.fullname" . }}-postgresql
{{- else -}}
{{- .Values.store.postgresql.host -}}
{{- end -}}
{{- end -}}

{{/* The aggregator's backend as JSON; null if clients use their own models. */}}
{{- define "fedone.aggregatorBackend" -}}
{{- if not (hasKey .Values.aggregator "backend") -}}
null
{{- else -}}
{{- $backend := deepCopy .Values.aggregator.backend -}}
{{- if .Values.vllm.enabled -}}
{{- $served := default .Values.vllm.model .Values.vllm.servedName -}}
{{- $url := printf "http://%s-vllm:8000" (include "fedone.fullname" .) -}}
{{- $backend = merge (dict "kind" "vllm" "base_url" $url "model" $served) $backend -}}
{{- if .Values.vllm.apiKeySecret -}}
{{- $_ := set $backend "api_key_env" "VLLM_API_KEY" -}}
{{- end -}}
{{- end -}}
{{- toJson (merge $backend (dict "kind" "onnx")) -}}
{{- end -}}
{{- end -}}

{{/* The environment variable with a backend's API key: (list backend secret). */}}
{{- define "fedone.keyEnv" -}}
{{- $backend := index . 0 -}}
{{- with index . 1 -}}
{{- include "fedone.secretEnv" (list (default "OPENAI_API_KEY" $backend.api_key_env) .) -}}
{{- end -}}
{{- end -}}

{{/* CONFIG.yaml of `fedone serve`. */}}
{{- define "fedone.serverConfig" -}}
{{- $given := deepCopy .Values.aggregator.config -}}
{{- $auth := dict "enrolment_tokens" (list) "admin_tokens" (list) -}}
{{- range $index, $token := .Values.aggregator.enrolmentTokens -}}
{{- $entry := merge (dict "env" (printf "ENROLMENT_TOKEN_%d" $index)) (omit $token "secret") -}}
{{- $_ := set $auth "enrolment_tokens" (append $auth.enrolment_tokens $entry) -}}
{{- end -}}
{{- range $index, $token := .Values.aggregator.adminTokens -}}
{{- $entry := merge (dict "env" (printf "ADMIN_TOKEN_%d" $index)) (omit $token "secret") -}}
{{- $_ := set $auth "admin_tokens" (append $auth.admin_tokens $entry) -}}
{{- end -}}
{{- $store := "/var/lib/fedone/fedone.db" -}}
{{- if eq .Values.store.kind "postgresql" -}}
{{- $database := .Values.store.postgresql -}}
{{- /* As parameters, because a host may also be an IPv6 address or the folder of a socket. */ -}}
{{- $query := list (printf "host=%s" (include "fedone.databaseHost" . | urlquery)) (printf "port=%d" (int $database.port)) -}}
{{- range $name, $value := $database.parameters -}}
{{- $query = append $query (printf "%s=%s" $name (urlquery $value)) -}}
{{- end -}}
{{- $url := printf "postgresql://%s@/%s?%s" (urlquery $database.user) $database.database (join "&" $query) -}}
{{- $store = dict "url" $url "password" (dict "env" "DATABASE_PASSWORD") -}}
{{- end -}}
{{- $runs := list -}}
{{- range $name, $_ := .Values.aggregator.runs -}}
{{- $runs = append $runs (printf "run-%s.yaml" $name) -}}
{{- end -}}
{{- $metrics := dict "enabled" .Values.monitoring.metrics -}}
{{- if .Values.monitoring.metrics -}}{{- $_ := set $metrics "listen" "[::]:9090" -}}{{- end -}}
{{- $config := dict
  "listen" "[::]:8080"
  "store" $store
  "auth" $auth
  "backend" (include "fedone.aggregatorBackend" . | fromJson)
  "runs" $runs
  "metrics" $metrics
-}}
{{- if not (hasKey .Values.aggregator "backend") -}}{{- $_ := set $config "backend" nil -}}{{- end -}}
{{- if .Values.aggregator.tls.secretName -}}
{{- $tls := dict "certificate" "/etc/fedone-tls/tls.crt" "key" "/etc/fedone-tls/tls.key" -}}
{{- if .Values.aggregator.tls.clientCertificates -}}{{- $_ := set $tls "client_ca" "/etc/fedone-tls/ca.crt" -}}{{- end -}}
{{- $_ := set $config "tls" $tls -}}
{{- end -}}
{{- toYaml (merge $config $given) -}}
{{- end -}}

{{/* The environment variables to which this CONFIG.yaml refers. */}}
{{- define "fedone.serverEnv" -}}
{{- range $index, $token := .Values.aggregator.enrolmentTokens }}
{{ include "fedone.secretEnv" (list (printf "ENROLMENT_TOKEN_%d" $index) $token.secret) }}
{{- end }}
{{- range $index, $token := .Values.aggregator.adminTokens }}
{{ include "fedone.secretEnv" (list (printf "ADMIN_TOKEN_%d" $index) $token.secret) }}
{{- end }}
{{- if eq .Values.store.kind "postgresql" }}
{{ include "fedone.secretEnv" (list "DATABASE_PASSWORD" .Values.store.postgresql.passwordSecret) }}
{{- end }}
{{- end -}}
