{{- /*
The template of a Ray pod, from a dict: root, component (head, router, engine), settings (its values). Its labels name no
version: whatever changes here makes KubeRay start a new cluster.
*/}}
{{- define "kvorum.podTemplate" -}}
{{- $root := .root }}
{{- $values := $root.Values }}
{{- $settings := .settings -}}
metadata:
  labels:
    {{- include "kvorum.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  # Names of Services mean nothing to the processes here.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "kvorum.gracePeriodSeconds" $root }}
  {{- if ne .component "head" }}
  automountServiceAccountToken: false
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    seccompProfile:
      type: RuntimeDefault
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "runtimeClassName" "priorityClassName" }}
  {{- with get $settings $field }}
  {{ $field }}: {{ toJson . }}
  {{- end }}
  {{- end }}
  {{- if and (eq .component "router") (not $settings.affinity) }}
  affinity:
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "kvorum.selector" $root | nindent 16 }}
                app.kubernetes.io/component: router
  {{- end }}
  containers:
    - name: ray-{{ .component }}
      image: {{ include "kvorum.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "kvorum.containerSecurity" $root | nindent 8 }}
      env:
        {{- include "kvorum.env" $root | trim | nindent 8 }}
      {{- include (printf "kvorum.%s" .component) $root | nindent 6 }}
      resources:
        {{- include "kvorum.resources" $settings | nindent 8 }}
      volumeMounts:
        - name: shm
          mountPath: /dev/shm
        {{- if ne .component "head" }}
        - name: models
          mountPath: /models
        {{- end }}
        {{- if $values.controlTLS.existingSecret }}
        - name: control-tls
          mountPath: /etc/kvorum/control-tls
          readOnly: true
        {{- end }}
        {{- if and (eq .component "router") $values.apiKey.existingSecret }}
        - name: api-key
          mountPath: /etc/kvorum/api-key
          readOnly: true
        {{- end }}
    {{- if eq .component "router" }}
    # A container has one readiness probe, but a router two protocols, and Serve says by a third whether it stops it.
    {{- $byGrpc := dict "grpc" (dict "port" (int $values.config.grpc_port)) }}
    {{- include "kvorum.probeContainer" (dict "root" $root "name" "grpc-health" "probe" $byGrpc) | nindent 4 }}
    {{- $byServe := dict "httpGet" (dict "path" "/-/healthz" "port" (int $values.config.port)) }}
    {{- include "kvorum.probeContainer" (dict "root" $root "name" "serve-health" "probe" $byServe) | nindent 4 }}
    {{- end }}
  volumes:
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $settings.shmSize | default "1Gi" }}
    {{- if ne .component "head" }}
    - name: models
      {{- if $values.models.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ $values.models.existingClaim }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ $values.models.sizeLimit }}
      {{- end }}
    {{- end }}
    {{- with $values.controlTLS.existingSecret }}
    - name: control-tls
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- if and (eq .component "router") $values.apiKey.existingSecret }}
    - name: api-key
      secret:
        secretName: {{ $values.apiKey.existingSecret }}
        defaultMode: 0440
        items:
          - key: {{ $values.apiKey.key }}
            path: key
    {{- end }}
{{- end }}

{{- /* A container that only carries a probe, from a dict: root, name, probe. */}}
{{- define "kvorum.probeContainer" -}}
- name: {{ .name }}
  image: {{ include "kvorum.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -c, "trap exit TERM; sleep infinity & wait"]
  securityContext:
    {{- include "kvorum.containerSecurity" .root | nindent 4 }}
  readinessProbe:
    {{- toYaml .probe | nindent 4 }}
    {{- include "kvorum.routerProbe" .root | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 16Mi}
{{- end }}

{{- define "kvorum.resources" -}}
{{- $resources := deepCopy .resources }}
{{- with .gpus }}
{{- $gpus := dict $.gpuResource (. | toString) }}
{{- range $kind := list "requests" "limits" }}
{{- $_ := set $resources $kind (merge $gpus (get $resources $kind | default dict)) }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "kvorum.head" -}}
ports:
  - name: gcs-server
    containerPort: 6379
  - name: dashboard
    containerPort: 8265
  - name: client
    containerPort: 10001
  # KubeRay reads from the head which ports its serve Service has.
  - name: serve
    containerPort: {{ .Values.config.port }}
  - name: metrics
    containerPort: 8080
{{- range list "readinessProbe" "livenessProbe" }}
{{ . }}:
  httpGet:
    path: /api/gcs_healthz
    port: dashboard
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ eq . "readinessProbe" | ternary 10 120 }}
{{- end }}
{{- end }}

{{- define "kvorum.router" -}}
ports:
  - name: serve
    containerPort: {{ .Values.config.port }}
  - name: serve-grpc
    containerPort: {{ .Values.config.grpc_port }}
  - name: metrics
    containerPort: 8080
readinessProbe:
  httpGet:
    path: /health
    port: serve
  {{- include "kvorum.routerProbe" . | nindent 2 }}
{{ include "kvorum.rayletLiveness" . }}
{{- end }}

{{- define "kvorum.routerProbe" -}}
periodSeconds: 3
timeoutSeconds: 2
failureThreshold: 2
{{- end }}

{{- define "kvorum.engine" -}}
ports:
  - name: metrics
    containerPort: 8080
readinessProbe:
  httpGet:
    path: /api/local_raylet_healthz
    port: 52365
  periodSeconds: 5
  timeoutSeconds: 5
{{ include "kvorum.rayletLiveness" . }}
{{- end }}

{{- /* Ray would take a third of the memory, more than /dev/shm has; kvorum keeps nothing large in it. */}}
{{- define "kvorum.objectStore" -}}
object-store-memory: {{ mul 256 1024 1024 | quote }}
{{- end }}

{{- define "kvorum.rayletLiveness" -}}
livenessProbe:
  httpGet:
    path: /api/local_raylet_healthz
    port: 52365
  initialDelaySeconds: 30
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 120
{{- end }}
