{{/* The number of routers without an autoscaler. Each stores its own responses, so several are the default
only if clients come back to theirs. */}}
{{- define "penstock.routers" -}}
{{- .Values.router.replicas | default (ternary 2 1 .Values.router.sessionAffinity.enabled) -}}
{{- end -}}

{{- define "penstock.mostRouters" -}}
{{- with .Values.router.autoscaling -}}
{{- ternary .maxReplicas (include "penstock.routers" $ | int) .enabled -}}
{{- end -}}
{{- end -}}

{{- define "penstock.routerArgs" -}}
{{- $router := .Values.router -}}
- --shards
- {{ include "penstock.shardSources" . | quote }}
- --workers
- {{ $router.workers | quote }}
- --shutdown-timeout-s
- {{ $router.shutdownTimeoutSeconds | quote }}
{{- with $router.shardWaitSeconds }}
- --shard-wait-s
- {{ . | quote }}
{{- end }}
{{- range include "penstock.models" . | fromJsonArray }}
{{- if .toZero }}
{{- range .servedNames | default (list .ownName) }}
- --expect-model
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.apiKeysFile }}
{{- if .existingSecret }}
- --api-keys-file
- /etc/penstock/api-keys/{{ .key }}
{{- end }}
{{- end }}
{{- if $router.tls.existingSecret }}
- --tls-cert-file
- /etc/penstock/tls/tls.crt
- --tls-key-file
- /etc/penstock/tls/tls.key
{{- end }}
{{- with .Values.shardTls }}
{{- if .existingSecret }}
- --shard-tls-ca-file
- /etc/penstock/shard-tls/ca.crt
- --shard-tls-server-name
- {{ include "penstock.shardServerName" $ | quote }}
{{- if .mutual }}
- --shard-tls-cert-file
- /etc/penstock/shard-tls/tls.crt
- --shard-tls-key-file
- /etc/penstock/shard-tls/tls.key
{{- end }}
{{- end }}
{{- end }}
{{- range $router.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "penstock.routerEnv" -}}
{{- include "penstock.secretEnv" (dict "name" "PENSTOCK_API_KEY" "secret" .Values.apiKey) }}
{{- include "penstock.secretEnv" (dict "name" "PENSTOCK_SHARD_API_KEY" "secret" (include "penstock.shardKey" . | fromJson)) }}
{{- include "penstock.secretEnv" (dict "name" "PENSTOCK_RESUME_KEY" "secret" (include "penstock.resumeKey" . | fromJson)) }}
{{- with .Values.router.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The mounted secrets, as JSON, by folder below /etc/penstock. Each has a folder, so that its changes
arrive. */}}
{{- define "penstock.routerSecrets" -}}
{{- $secrets := dict -}}
{{- with .Values.apiKeysFile.existingSecret -}}
{{- $_ := set $secrets "api-keys" . -}}
{{- end -}}
{{- with .Values.router.tls.existingSecret -}}
{{- $_ := set $secrets "tls" . -}}
{{- end -}}
{{- with .Values.shardTls -}}
{{- if .existingSecret -}}
{{- $_ := set $secrets "shard-tls" (.routerSecret | default .existingSecret) -}}
{{- end -}}
{{- end -}}
{{- toJson $secrets -}}
{{- end -}}
