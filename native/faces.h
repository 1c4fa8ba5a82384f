#ifndef WF_FACES_H
#define WF_FACES_H

int launch_main(void);
int reroot_main(void);
int keep_main(void);
int guest_main(void);

#endif
