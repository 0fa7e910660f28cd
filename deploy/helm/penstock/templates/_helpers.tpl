{{/* The name that all resources of a release begin with. Short enough that with a model's name behind
it (20 characters at most) it fits into the labels that Kubernetes makes of it. */}}
{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 28 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 28 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 28 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.routerName" -}}
{{- include "penstock.fullname" . }}-router
{{- end -}}

{{/* Labels that never change, for selectors. Called with "root" and, to say which pods, "component"
(router, shard or shard-worker), "model" or both. */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .model }}
model: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* An entry of a container's env whose value is in a secret. Called with
(dict "name" "HF_TOKEN" "secret" .Values.shard.hubToken); nothing where no secret is named. */}}
{{- define "penstock.secretEnv" -}}
{{- if .secret.existingSecret }}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret.existingSecret | quote }}
      key: {{ .secret.key | quote }}
{{- end }}
{{- end -}}

{{/* The name of the secret that the chart makes for the shards' key; empty where it makes none: where a
secret has one, where clients have no key either, or where shards ask for the router's certificate. */}}
{{- define "penstock.ownShardKey" -}}
{{- $given := or .Values.shardApiKey.existingSecret .Values.apiKey.existingSecret -}}
{{- $mutual := and .Values.shardTls.existingSecret .Values.shardTls.mutual -}}
{{- if and .Values.apiKeysFile.existingSecret (not (or $given $mutual)) -}}
{{- include "penstock.fullname" . }}-shard-key
{{- end -}}
{{- end -}}

{{/* Where shardApiKey is, as JSON: named in the values, or made by the chart. */}}
{{- define "penstock.shardKey" -}}
{{- $own := include "penstock.ownShardKey" . -}}
{{- if $own -}}
{{- dict "existingSecret" $own "key" "shard-api-key" | toJson -}}
{{- else -}}
{{- toJson .Values.shardApiKey -}}
{{- end -}}
{{- end -}}

{{/* The user of the images. */}}
{{- define "penstock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where pods may run. Called with (dict "settings" .Values.router "selector" LABELS). */}}
{{- define "penstock.placement" -}}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - labelSelector:
      matchLabels:
        {{- $.selector | nindent 8 }}
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
