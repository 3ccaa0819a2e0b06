{{/* operator.yaml: the model Settings in operator/kitestring_operator/settings.py. */}}
{{- define "kitestring.config" -}}
images:
  operator: {{ include "kitestring.image" (list . "operator" "operator") | quote }}
  rollout: {{ include "kitestring.image" (list . "rollout" "rollout") | quote }}
  trainer: {{ include "kitestring.image" (list . "trainer" "trainer") | quote }}
  trainerGpu: {{ include "kitestring.image" (list . "trainerGpu" "trainer-gpu") | quote }}
  policyServerCpu: {{ include "kitestring.image" (list . "policyServerCpu" "policy-server-cpu") | quote }}
  policyServerVllm: {{ .Values.images.policyServerVllm | quote }}
  collectorContrib: {{ .Values.images.collectorContrib | quote }}
imagePullPolicy: {{ .Values.images.pullPolicy }}
{{- if include "kitestring.hasStorage" . }}
defaultStorage:
  {{- include "kitestring.storageSettings" . | trim | nindent 2 }}
{{- end }}
collectorKind: {{ .Values.settings.collectorKind }}
{{- with .Values.settings.defaultTemplates }}
defaultTemplates:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.settings.clusterDomain }}
clusterDomain: {{ . | quote }}
{{- end }}
namespaces: {{ .Values.namespaces | toJson }}
jobCreationPerSecond: {{ .Values.settings.jobCreationPerSecond }}
pollSeconds: {{ .Values.settings.pollSeconds }}
resyncSeconds: {{ .Values.settings.resyncSeconds }}
leaderElection:
  enabled: true
  leaseName: {{ include "kitestring.name" . }}
  namespace: {{ .Release.Namespace }}
  leaseSeconds: {{ .Values.settings.leaseSeconds }}
  renewSeconds: {{ div (int .Values.settings.leaseSeconds) 3 }}
{{- end -}}
