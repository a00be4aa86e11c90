{{/* Common parts of pods, containers, volumes and network policies. */}}

{{- define "fedone.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The scheduling of a component's pods; the argument is the component's values. */}}
{{- define "fedone.placing" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* The beginning of every pod's spec. Pods do not call Kubernetes, so they get no token. Service links
     are disabled, because programs would read variables such as VLLM_PORT as settings. */}}
{{- define "fedone.podHead" -}}
serviceAccountName: {{ include "fedone.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- include "fedone.pullSecrets" . }}
{{- end -}}

{{- define "fedone.pullSecrets" -}}
{{- with concat (default list .Values.global.imagePullSecrets) .Values.imagePullSecrets | uniq }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A probe of the aggregator: (list $ path defaults overrides). If client certificates are required,
     the probe only opens a connection, because the kubelet has no certificate. */}}
{{- define "fedone.probe" -}}
{{- $root := index . 0 -}}
{{- $path := index . 1 -}}
{{- $probe := merge (deepCopy (index . 3)) (index . 2) -}}
{{- $keys := keys $probe -}}
{{- if not (or (has "httpGet" $keys) (has "exec" $keys) (has "tcpSocket" $keys) (has "grpc" $keys)) -}}
{{- with $root.Values.aggregator.tls -}}
{{- if and .secretName .clientCertificates -}}
{{- $_ := set $probe "tcpSocket" (dict "port" "http") -}}
{{- else -}}
{{- $get := dict "path" $path "port" "http" -}}
{{- if .secretName -}}{{- $_ := set $get "scheme" "HTTPS" -}}{{- end -}}
{{- $_ := set $probe "httpGet" $get -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $probe -}}
{{- end -}}

{{/* An environment variable from a Secret: (list "NAME" secret). */}}
{{- define "fedone.secretEnv" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef: {name: {{ (index . 1).name }}, key: {{ (index . 1).key }}}
{{- end -}}

{{/* The headless Service that a StatefulSet needs for its pods' names: (list $ component portName port). */}}
{{- define "fedone.headless" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "fedone.fullname" $root }}-{{ $component }}-headless
  labels: {{- include "fedone.labels" (list $root $component) | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{- include "fedone.selector" (list $root $component) | nindent 4 }}
  ports:
    - {name: {{ index . 2 }}, port: {{ index . 3 }}, targetPort: {{ index . 2 }}}
{{- end -}}

{{/* The spec of a volume claim: (list size storageClass accessModes). */}}
{{- define "fedone.claim" -}}
accessModes: {{ toJson (index . 2) }}
{{- with index . 1 }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests: {storage: {{ index . 0 }}}
{{- end -}}

{{/* Egress to DNS, for every pod that resolves names. */}}
{{- define "fedone.dnsEgress" -}}
- to: {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  # 5353 is the port of OpenShift's DNS pods: policies apply after the Service's port is translated.
  ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}, {port: 5353, protocol: UDP}, {port: 5353, protocol: TCP}]
{{- end -}}

{{/* Egress to the internet, for the Hugging Face hub or a model outside this chart. */}}
{{- define "fedone.internetEgress" -}}
{{- with .Values.networkPolicy.internet -}}
- {{ with .to }}to: {{- toYaml . | nindent 4 }}
  {{ end }}ports: [{port: {{ .port }}, protocol: TCP}]
{{- end }}
{{- end -}}

{{/* Egress to the database. */}}
{{- define "fedone.databaseEgress" -}}
{{- if .Values.postgresql.enabled -}}
- to:
    - podSelector:
        matchLabels: {{- include "fedone.selector" (list . "postgresql") | nindent 10 }}
  ports: [{port: 5432, protocol: TCP}]
{{- else -}}
- ports: [{port: {{ .Values.store.postgresql.port }}, protocol: TCP}]
  {{- with .Values.networkPolicy.database }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}
