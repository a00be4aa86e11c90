{{/* What the aggregator and its check have in common. */}}
{{- define "fedone.aggregatorContainer" -}}
image: {{ include "fedone.image" (list . .Values.image) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [fedone]
env:
  - {name: HOME, value: /tmp}
  {{- include "fedone.serverEnv" . | trim | nindent 2 }}
  {{- if and .Values.vllm.enabled .Values.vllm.apiKeySecret }}
  {{- include "fedone.secretEnv" (list "VLLM_API_KEY" .Values.vllm.apiKeySecret) | nindent 2 }}
  {{- end }}
  {{- with include "fedone.keyEnv" (list (default dict .Values.aggregator.backend) .Values.aggregator.apiKeySecret) }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .Values.aggregator.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources: {{- toYaml .Values.aggregator.resources | nindent 2 }}
securityContext: {{- include "fedone.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/fedone, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if eq .Values.store.kind "sqlite" }}
  - {name: store, mountPath: /var/lib/fedone}
  {{- end }}
  {{- with .Values.aggregator.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
