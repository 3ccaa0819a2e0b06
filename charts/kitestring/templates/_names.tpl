{{/* Name of the operator's objects: the release, with the chart's name unless it is in it. */}}
{{- define "kitestring.name" -}}
{{- if contains "kitestring" .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-kitestring" .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "kitestring.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "kitestring.name" .) }}
{{- else -}}
{{ required "serviceAccount.name: found nothing, and serviceAccount.create is false; name the ServiceAccount that the operator is to use" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* What identifies the operator's pods; never changes, since a Deployment's selector cannot. */}}
{{- define "kitestring.selector" -}}
app.kubernetes.io/name: kitestring
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "kitestring.seaweedfsSelector" -}}
app.kubernetes.io/name: seaweedfs
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: storage
{{- end -}}

{{- define "kitestring.chartLabels" -}}
app.kubernetes.io/part-of: kitestring
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of the operator's objects. */}}
{{- define "kitestring.labels" -}}
{{ include "kitestring.selector" . }}
{{ include "kitestring.chartLabels" . }}
{{- end -}}

{{- define "kitestring.seaweedfsLabels" -}}
{{ include "kitestring.seaweedfsSelector" . }}
{{ include "kitestring.chartLabels" . }}
{{- end -}}

{{/* One of our images: include "kitestring.image" (list . "policyServerCpu" "policy-server-cpu") */}}
{{- define "kitestring.image" -}}
{{- $root := index . 0 -}}
{{- $images := $root.Values.images -}}
{{- index $images (index . 1) | default (printf "%s%s:%s" $images.prefix (index . 2) ($images.tag | default $root.Chart.AppVersion)) -}}
{{- end -}}
