{{/* Whether there is a default storage: "true" or nothing. Refuses values that contradict each other. */}}
{{- define "kitestring.hasStorage" -}}
{{- $storage := .Values.defaultStorage -}}
{{- range $field := list "bucket" "prefix" "endpoint" "region" "existingSecret" "accessKeyId" "secretAccessKey" -}}
{{- if index $storage $field -}}
{{- if $.Values.seaweedfs.enabled -}}
{{- fail (printf "seaweedfs.enabled: found true, and defaultStorage.%s is set; use one of the two" $field) -}}
{{- else if not $storage.bucket -}}
{{- fail (printf "defaultStorage.bucket: found nothing, and defaultStorage.%s is set; name the bucket, or set none of them" $field) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $pair := and $storage.accessKeyId $storage.secretAccessKey -}}
{{- if and $storage.bucket (not $storage.existingSecret) (not $pair) -}}
{{- fail (printf "defaultStorage.bucket: found %q and no keys; set defaultStorage.existingSecret, or accessKeyId and secretAccessKey" $storage.bucket) -}}
{{- end -}}
{{- if and $storage.existingSecret (or $storage.accessKeyId $storage.secretAccessKey) -}}
{{- fail (printf "defaultStorage.existingSecret: found %q, and accessKeyId or secretAccessKey too; use one of the two" $storage.existingSecret) -}}
{{- end -}}
{{- if or $storage.bucket .Values.seaweedfs.enabled -}}true{{- end -}}
{{- end -}}

{{/* Secret with the keys of the default storage. */}}
{{- define "kitestring.storageSecret" -}}
{{- .Values.defaultStorage.existingSecret | default (printf "%s-storage" (include "kitestring.name" .)) -}}
{{- end -}}

{{/* Changes with the keys that the values give; a key that is drawn does not change. */}}
{{- define "kitestring.storageKeysDigest" -}}
{{- $values := .Values.defaultStorage -}}
{{- if .Values.seaweedfs.enabled }}{{ $values = .Values.seaweedfs }}{{ end -}}
{{- printf "%s/%s" $values.accessKeyId $values.secretAccessKey | sha256sum -}}
{{- end -}}

{{/* defaultStorage of operator.yaml. */}}
{{- define "kitestring.storageSettings" -}}
{{- $storage := .Values.defaultStorage -}}
{{- if .Values.seaweedfs.enabled }}
bucket: {{ .Values.seaweedfs.bucket | quote }}
endpoint: {{ printf "http://%s-seaweedfs.%s.svc:8333" (include "kitestring.name" .) .Release.Namespace | quote }}
{{- else }}
bucket: {{ $storage.bucket | quote }}
{{- range $field := list "prefix" "endpoint" "region" }}
{{- with index $storage $field }}
{{ $field }}: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
accessKeyFile: /etc/kitestring-secrets/storage/accessKeyId
secretKeyFile: /etc/kitestring-secrets/storage/secretAccessKey
{{- end -}}
