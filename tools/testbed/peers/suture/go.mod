module nodekeel/peers/suture

go 1.23

require github.com/thejerf/suture/v4 v4.0.6
