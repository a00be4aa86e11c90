{{/* What pods and containers have in common. */}}

{{- define "fedone.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* How a component's pods are placed: its values. */}}
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

{{/* The head of every pod's spec. A Service's name in variables, such as FEDONE_PORT or VLLM_PORT,
     would be taken for a setting, and nothing here talks to Kubernetes. */}}
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

{{/* A probe of the aggregator with a component's changes: (list $ path own changes). With client
     certificates the kubelet, which has none, can only open a connection. */}}
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

{{/* A variable from a Secret: (list "NAME" secret). */}}
{{- define "fedone.secretEnv" -}}
- name: {{ index . 0 }}
  valueFrom:
    secretKeyRef: {name: {{ (index . 1).name }}, key: {{ (index . 1).key }}}
{{- end -}}

{{/* The headless Service of a StatefulSet, which gives its pods names: (list $ component portName port). */}}
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

{{/* The claim for a volume: (list size storageClass accessModes). */}}
{{- define "fedone.claim" -}}
accessModes: {{ toJson (index . 2) }}
{{- with index . 1 }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests: {storage: {{ index . 0 }}}
{{- end -}}

{{/* Ways that every pod with names to look up needs. */}}
{{- define "fedone.dnsEgress" -}}
- to: {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  # OpenShift's DNS pods listen at 5353; a policy sees a packet after the Service's translation.
  ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}, {port: 5353, protocol: UDP}, {port: 5353, protocol: TCP}]
{{- end -}}

{{/* To a model outside of this chart. */}}
{{- define "fedone.internetEgress" -}}
{{- with .Values.networkPolicy.internet -}}
- {{ with .to }}to: {{- toYaml . | nindent 4 }}
  {{ end }}ports: [{port: {{ .port }}, protocol: TCP}]
{{- end }}
{{- end -}}

{{/* To the database. */}}
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
