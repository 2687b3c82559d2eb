{{/*
A file of deploy/, which is linked into manifests/, with the names of this release: the manifests exist once. Objects that are
of no namespace end with the name of the release, so that each release has its own; those of the release `nodekeel` do not.
*/}}
{{- define "nodekeel.manifest" -}}
{{- $chart := index . 0 -}}
{{- $values := $chart.Values -}}
{{- if eq (dir $values.directory) "/" -}}
{{- fail "directory: use one below another directory, such as /var/lib/nodekeel" -}}
{{- end -}}
{{- $suffix := ternary "" (printf "-%s" $chart.Release.Name) (eq $chart.Release.Name "nodekeel") -}}
{{- $text := $chart.Files.Get (printf "manifests/%s" (index . 1))
  | replace "/var/lib/nodekeel" $values.directory
  | replace "/var/lib # above --directory" (dir $values.directory)
  | replace "/var/lib/kubelet" $values.kubelet
  | replace "volumes.nodekeel" $values.driver
  | replace "namespace: nodekeel" (printf "namespace: %s" $chart.Release.Namespace)
  | replace "serviceaccount:nodekeel:" (printf "serviceaccount:%s:" $chart.Release.Namespace)
  | replace "nodekeel/provisionerd:0.1.0" (printf "%s:%s" $values.image.repository (default $chart.Chart.AppVersion $values.image.tag))
  | replace "imagePullPolicy: IfNotPresent" (printf "imagePullPolicy: %s" $values.image.pullPolicy)
-}}
{{- range $index, $object := splitList "\n---\n" $text -}}
{{- if $index }}{{ "\n---\n" }}{{ end -}}
{{- if regexMatch "(?m)^kind: (Cluster|ValidatingAdmission|VolumeSnapshotClass)" $object -}}
{{- /* The object, the policy of a binding, and the role; not the accounts of a binding, which are below. */ -}}
{{- regexReplaceAll "(?m)^(  name|  policyName): (\\S+)$" $object (printf "${1}: ${2}%s" $suffix) -}}
{{- else -}}
{{- $object -}}
{{- end -}}
{{- end -}}
{{- end -}}
