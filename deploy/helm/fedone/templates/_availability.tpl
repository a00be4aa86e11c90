{{/* PodDisruptionBudget and HorizontalPodAutoscaler of a component: (list $ "aggregator" "Deployment"). */}}
{{- define "fedone.availability" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index $root.Values $component -}}
{{- $name := printf "%s-%s" (include "fedone.fullname" $root) $component -}}
{{- if $values.podDisruptionBudget.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{- include "fedone.labels" (list $root $component) | nindent 4 }}
spec:
  maxUnavailable: {{ $values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels: {{- include "fedone.selector" (list $root $component) | nindent 6 }}
{{- end }}
{{- if $values.autoscaling.enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ $name }}
  labels: {{- include "fedone.labels" (list $root $component) | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: {{ index . 2 }}, name: {{ $name }}}
  {{- with $values.autoscaling }}
  minReplicas: {{ .minReplicas }}
  maxReplicas: {{ .maxReplicas }}
  metrics:
    {{- with .targetRequestsInProgress }}
    # The CPU alone is not enough: it is idle while requests wait for the model.
    - type: Pods
      pods:
        metric: {name: fedone_requests_in_progress}
        target: {type: AverageValue, averageValue: {{ . | quote }}}
    {{- end }}
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ .targetCPUUtilizationPercentage }}}
  {{- with .behavior }}
  behavior: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end -}}
