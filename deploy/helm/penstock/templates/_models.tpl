{{/* All models, as JSON: settings of `shard`, replaced by the model's own, and

    fullname    name of its StatefulSet or LeaderWorkerSet and of its service
    totalGpus   GPUs of one shard, over all its pods
    autoscales  true if an autoscaler sets the number of shards
    ownName     name if servedNames is empty: as shards do, the last part of a path
    toZero      true if it may scale to zero */}}
{{- define "penstock.models" -}}
{{- $models := list -}}
{{- $names := list "router" -}}
{{- if .Values.shard.name -}}
{{- fail "shard.name: shard is for all models; names are for the entries of models" -}}
{{- end -}}
{{- range .Values.models -}}
{{- if has .name $names -}}
{{- fail (printf "models: the name %s is taken; each needs one of its own, and router is the router's" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- $model := mergeOverwrite (deepCopy $.Values.shard) . -}}
{{- $_ := set $model "fullname" (printf "%s-%s" (include "penstock.fullname" $) .name) -}}
{{- $_ := set $model "totalGpus" (mul $model.gpus $model.nodes) -}}
{{- $_ := set $model "autoscales" (ne $model.autoscaling.kind "none") -}}
{{- $source := $model.model | default "penstock-toy" -}}
{{- $_ := set $model "ownName" (ternary (base $source | trimSuffix ".gguf") $source (hasPrefix "/" $source)) -}}
{{- $_ := set $model "toZero" (and (eq $model.autoscaling.kind "keda") (lt (int $model.autoscaling.minReplicas) 1)) -}}
{{- include "penstock.checkModel" (dict "root" $ "model" $model) -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{/* Checks what the schema cannot: two values together, and a model with its defaults. */}}
{{- define "penstock.checkModel" -}}
{{- $model := .model -}}
{{- $where := printf "models, %s:" $model.name -}}
{{- with $model.cache -}}
{{- if and (eq .type "existing") (not .existingClaim) -}}
{{- fail (printf "%s cache.type existing needs cache.existingClaim" $where) -}}
{{- end -}}
{{- if and (eq .type "perPod") (gt (int $model.nodes) 1) -}}
{{- fail (printf "%s cache.type perPod is for one node; with nodes %d choose emptyDir or existing" $where (int $model.nodes)) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int $model.nodes) 1) (lt (int $model.gpus) 1) -}}
{{- fail (printf "%s nodes %d needs gpus: several pods share a model only over GPUs" $where (int $model.nodes)) -}}
{{- end -}}
{{- if eq $model.engine "vllm" -}}
{{- if lt (int $model.gpus) 1 -}}
{{- fail (printf "%s engine vllm needs gpus" $where) -}}
{{- end -}}
{{- if gt (int $model.nodes) 1 -}}
{{- fail (printf "%s engine vllm serves a model on one node; nodes is %d" $where (int $model.nodes)) -}}
{{- end -}}
{{- if $model.kvHostMemory -}}
{{- fail (printf "%s engine vllm keeps no copies of KV blocks for kvHostMemory" $where) -}}
{{- end -}}
{{- else if $model.engineArgs -}}
{{- fail (printf "%s engineArgs needs engine vllm" $where) -}}
{{- end -}}
{{- if and (ne $model.role "both") (or (not $model.kvHostMemory) (not .root.Values.kvPeerKey.existingSecret)) -}}
{{- fail (printf "%s role %s needs kvHostMemory and kvPeerKey.existingSecret: requests go on elsewhere with their KV blocks" $where $model.role) -}}
{{- end -}}
{{- with $model.autoscaling -}}
{{- if and (ne .kind "none") (lt (int .maxReplicas) (int .minReplicas)) -}}
{{- fail (printf "%s autoscaling.maxReplicas %d is below minReplicas %d" $where (int .maxReplicas) (int .minReplicas)) -}}
{{- end -}}
{{- if and (eq .kind "hpa") (lt (int .minReplicas) 1) -}}
{{- fail (printf "%s autoscaling.minReplicas 0 needs autoscaling.kind keda" $where) -}}
{{- end -}}
{{- if and $model.toZero (not $.root.Values.router.shardWaitSeconds) -}}
{{- fail (printf "%s autoscaling.minReplicas 0 needs router.shardWaitSeconds: how long a request waits for a shard to start" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Where the router finds all shards. The name of each model's headless service resolves to its pods'
addresses, so that the router follows their number. */}}
{{- define "penstock.shardSources" -}}
{{- $sources := list -}}
{{- range include "penstock.models" . | fromJsonArray -}}
{{- $sources = append $sources (printf "dns://%s:50051" .fullname) -}}
{{- end -}}
{{- join "," $sources -}}
{{- end -}}

{{/* The name in shards' certificates, because the router finds shards by address. */}}
{{- define "penstock.shardServerName" -}}
{{- .Values.shardTls.serverName | default (printf "%s-shard" (include "penstock.fullname" .)) -}}
{{- end -}}

{{/* The set of a model's shards, for autoscalers. Called with a model. */}}
{{- define "penstock.scaleTarget" -}}
{{- if gt (int .nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: StatefulSet
{{- end }}
name: {{ .fullname }}
{{- end -}}

{{/* A PromQL pattern that matches a model's names in requests, and the empty name. */}}
{{- define "penstock.namesPattern" -}}
{{- $names := list "" -}}
{{- range append .servedNames .ownName -}}
{{- $names = append $names (regexQuoteMeta .) -}}
{{- end -}}
{{- printf "%q" (join "|" $names) -}}
{{- end -}}
