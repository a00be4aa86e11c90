{{/* The files that the programs read, and the variables with their secrets. */}}

{{- define "fedone.gatewayUrl" -}}
http://{{ include "fedone.fullname" . }}-gateway:8090
{{- end -}}

{{- define "fedone.databaseHost" -}}
{{- if .Values.postgresql.enabled -}}
{{- include "fedone.fullname" . }}-postgresql
{{- else -}}
{{- .Values.store.postgresql.host -}}
{{- end -}}
{{- end -}}

{{/* The aggregator's model; "null" where clients bring their own. */}}
{{- define "fedone.aggregatorBackend" -}}
{{- if not (hasKey .Values.aggregator "backend") -}}
null
{{- else if .Values.gateway.enabled -}}
{{- toJson (merge (dict "kind" "gateway" "url" (include "fedone.gatewayUrl" .)) .Values.aggregator.backend) -}}
{{- else -}}
{{- toJson (merge (deepCopy .Values.aggregator.backend) (dict "kind" "onnx")) -}}
{{- end -}}
{{- end -}}

{{/* The gateway's model. */}}
{{- define "fedone.gatewayBackend" -}}
{{- $backend := deepCopy .Values.gateway.backend -}}
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

{{/* The variable that a backend reads its key from: (list backend secret). */}}
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
{{- $query := list -}}
{{- range $name, $value := $database.parameters -}}
{{- $query = append $query (printf "%s=%s" $name (urlquery $value)) -}}
{{- end -}}
{{- $address := printf "%s:%d" (include "fedone.databaseHost" .) (int $database.port) -}}
{{- $url := printf "postgresql://%s@%s/%s" (urlquery $database.user) $address $database.database -}}
{{- if $query -}}{{- $url = printf "%s?%s" $url (join "&" $query) -}}{{- end -}}
{{- $store = dict "url" $url "password" (dict "env" "DATABASE_PASSWORD") -}}
{{- end -}}
{{- $runs := list -}}
{{- range $name, $_ := .Values.aggregator.runs -}}
{{- $runs = append $runs (printf "run-%s.yaml" $name) -}}
{{- end -}}
{{- $metrics := dict "enabled" .Values.monitoring.metrics -}}
{{- if .Values.monitoring.metrics -}}{{- $_ := set $metrics "listen" "0.0.0.0:9090" -}}{{- end -}}
{{- $config := dict
  "listen" "0.0.0.0:8080"
  "store" $store
  "auth" (merge $auth (default dict $given.auth))
  "backend" (include "fedone.aggregatorBackend" . | fromJson)
  "runs" $runs
  "metrics" $metrics
-}}
{{- if not (hasKey .Values.aggregator "backend") -}}{{- $_ := set $config "backend" nil -}}{{- end -}}
{{- toYaml (merge $config $given) -}}
{{- end -}}

{{/* The variables that CONFIG.yaml of `fedone serve` names. */}}
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

{{/* CONFIG.yaml of `fedone gateway`. */}}
{{- define "fedone.gatewayConfig" -}}
{{- $tokens := dict "aggregator" (dict "env" "FEDONE_GATEWAY_TOKEN") -}}
{{- range $index, $name := keys .Values.gateway.callers | sortAlpha -}}
{{- $_ := set $tokens $name (dict "env" (printf "CALLER_TOKEN_%d" $index)) -}}
{{- end -}}
{{- $config := dict
  "listen" "0.0.0.0:8090"
  "tokens" $tokens
  "backend" (include "fedone.gatewayBackend" . | fromJson)
-}}
{{- if .Values.gateway.persistence.enabled -}}
{{- $_ := set $config "ledger" "/var/lib/fedone/ledger.db" -}}
{{- end -}}
{{- with .Values.gateway.budget -}}{{- $_ := set $config "budget" . -}}{{- end -}}
{{- toYaml (merge $config .Values.gateway.config) -}}
{{- end -}}

{{/* The variables that CONFIG.yaml of `fedone gateway` names. */}}
{{- define "fedone.gatewayEnv" -}}
{{ include "fedone.secretEnv" (list "FEDONE_GATEWAY_TOKEN" .Values.gateway.tokenSecret) }}
{{- range $index, $name := keys .Values.gateway.callers | sortAlpha }}
{{ include "fedone.secretEnv" (list (printf "CALLER_TOKEN_%d" $index) (index $.Values.gateway.callers $name)) }}
{{- end }}
{{- with .Values.vllm }}
{{- if and .enabled .apiKeySecret }}
{{ include "fedone.secretEnv" (list "VLLM_API_KEY" .apiKeySecret) }}
{{- end }}
{{- end }}
{{- with include "fedone.keyEnv" (list .Values.gateway.backend .Values.gateway.apiKeySecret) }}
{{ . }}
{{- end }}
{{- end -}}
