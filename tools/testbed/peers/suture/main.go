// Does with suture what nodekeel's bench of the supervision tree does with its own, and prints one figure a line.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/thejerf/suture/v4"
)

// failing ends at once, and notes how long its restarts take.
type failing struct {
	ended   time.Time
	samples []float64
	rounds  int
	done    chan struct{}
}

func (f *failing) Serve(context.Context) error {
	if !f.ended.IsZero() {
		f.samples = append(f.samples, float64(time.Since(f.ended).Nanoseconds()))
	}
	if len(f.samples) == f.rounds {
		close(f.done)
		return suture.ErrDoNotRestart
	}
	f.ended = time.Now()
	return errors.New("fails")
}

// waiting counts that it is up, and waits.
type waiting struct{ up *atomic.Int64 }

func (w *waiting) Serve(ctx context.Context) error {
	w.up.Add(-1)
	<-ctx.Done()
	return ctx.Err()
}

func rss() int {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		panic(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	if err != nil {
		panic(err)
	}
	return pages * os.Getpagesize()
}

func supervisor() *suture.Supervisor {
	// Never in backoff: what is measured is the restart itself.
	return suture.New("root", suture.Spec{FailureThreshold: 1e12, EventHook: func(suture.Event) {}})
}

func main() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if os.Args[1] == "restart" {
		f := &failing{rounds: 10000, done: make(chan struct{})}
		s := supervisor()
		s.Add(f)
		s.ServeBackground(ctx)
		<-f.done
		sort.Float64s(f.samples)
		fmt.Println(f.samples[len(f.samples)/2])
		return
	}
	const count = 10000
	var up atomic.Int64
	up.Store(count)
	before, began := rss(), time.Now()
	s := supervisor()
	s.ServeBackground(ctx)
	for i := 0; i < count; i++ {
		s.Add(&waiting{&up})
	}
	for up.Load() > 0 {
		time.Sleep(100 * time.Microsecond)
	}
	fmt.Println(float64(time.Since(began).Nanoseconds()))
	fmt.Println(float64(rss()-before) / count)
}
